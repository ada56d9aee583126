"""Single edits of the syntax tree that put a bug into a function.

Only the text of the changed node changes, so the rest of the file is as its authors wrote it.
Standard library only: what agents wrote is changed in a disposable process (rewards/tested.py).
"""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rl_code.text import python_source
from rl_code.text.lines import split_lines

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
# Statements that may be left out.
_REMOVABLE = (ast.AugAssign, ast.Assign, ast.Expr, ast.Raise, ast.Delete, ast.Continue, ast.Break)


@dataclasses.dataclass(frozen=True)
class Edit:
    """A node and the text that takes its place; "" where a statement or a branch goes."""

    operator: str
    node: ast.expr | ast.stmt
    text: str


class Lines(NamedTuple):
    """Lines of a file that become others."""

    # The first of them, counted from 1.
    first: int
    # Lines with their ends.
    old: tuple[str, ...]
    new: tuple[str, ...]

    def of(self, lines: list[str]) -> str:
        """The text of the whole file, of which these are the lines, after the change."""
        at = self.first - 1
        return "".join([*lines[:at], *self.new, *lines[at + len(self.old) :]])


def edits(function: ast.FunctionDef) -> Iterator[Edit]:
    """All single edits of a function's body."""
    documented = ast.get_docstring(function) is not None
    body = function.body[1:] if documented else function.body
    if not body:
        return
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        for mutate in _MUTATIONS:
            yield from mutate(node)
        waiting += [
            child
            for child in ast.iter_child_nodes(node)
            # what only says of types or texts what they are is never wrong in a run
            if not isinstance(child, ast.JoinedStr | ast.arguments)
        ]
    # Of a body that is one statement nothing may be left out: that would be another task.
    if len(body) > 1:
        for statement in body:
            yield from _removed_statement(statement)


def _compared(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        changed = copy.copy(node)
        changed.ops = [_COMPARISONS[type(node.ops[0])]()]
        ordered = isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        yield Edit("off by one" if ordered else "comparison", node, ast.unparse(changed))


def _computed(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
            return  # formats a text
        changed = copy.copy(node)
        changed.op = _OPERATORS[type(node.op)]()
        yield Edit("operator", node, f"{_wrapped(changed)}")
    elif isinstance(node, ast.BoolOp):
        changed = copy.copy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield Edit("operator", node, _wrapped(changed))
    elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        changed = copy.copy(node)
        changed.op = _OPERATORS[type(node.op)]()
        yield Edit("operator", node, ast.unparse(changed))


def _counted(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value + 1, node.value - 1):
            yield Edit("off by one", node, str(value) if value >= 0 else f"({value})")
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("range", "len")
        and len(node.args) == 1
    ):
        yield Edit(
            "off by one",
            node,
            f"({ast.unparse(node)} - 1)"
            if node.func.id == "len"
            else f"range({ast.unparse(node.args[0])} - 1)",
        )


def _constant(node: ast.AST) -> Iterator[Edit]:
    match node:
        case ast.Constant(value=bool(value)):
            yield Edit("constant", node, str(not value))
        case ast.Constant(value=float(value)):
            yield Edit("constant", node, repr(value * 2 + 1))
        case ast.Constant(value=str(value)) if len(value) < 20 and node.lineno == node.end_lineno:
            yield Edit("constant", node, repr(value[1:] if len(value) > 1 else value + " "))


def _inverted(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        test = node.test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield Edit("inverted condition", test, _wrapped(test.operand))
        else:
            yield Edit("inverted condition", test, f"not {_wrapped(test)}")


def _branch(node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.If):
        return
    if node.orelse and not (len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)):
        yield Edit("removed branch", node, "")  # the one behind else
    elif not node.orelse:
        yield Edit("removed branch", node, "")


def _swapped(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        first, second, *rest = node.args
        plain = not any(isinstance(one, ast.Starred) for one in (first, second))
        if plain and ast.dump(first) != ast.dump(second):
            changed = copy.copy(node)
            changed.args = [second, first, *rest]
            yield Edit("swapped arguments", node, ast.unparse(changed))


def _removed_statement(node: ast.stmt) -> Iterator[Edit]:
    if isinstance(node, _REMOVABLE) and not isinstance(getattr(node, "value", 0), ast.Constant):
        yield Edit("removed statement", node, "")


def _inner_statements(node: ast.AST) -> Iterator[Edit]:
    """Statements inside of others."""
    for field in ("body", "orelse", "finalbody"):
        for child in getattr(node, field, None) or () if isinstance(node, ast.stmt) else ():
            yield from _removed_statement(child)


_MUTATIONS: Sequence[Callable[[ast.AST], Iterator[Edit]]] = (
    _compared,
    _computed,
    _counted,
    _constant,
    _inverted,
    _branch,
    _swapped,
    _inner_statements,
)


def _wrapped(node: ast.expr) -> str:
    """The text of an expression that may stand anywhere."""
    text = ast.unparse(node)
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript)
    return text if simple else f"({text})"


def as_lines(begin: int, end: int, lines: list[str], edit: Edit) -> Lines | None:
    """The edit as lines; None where it does not fit, or changes nothing.

    begin, end: the first and the last line of the function, counted from 1. lines: of the file.
    """
    node = edit.node
    first, last = node.lineno - 1, node.end_lineno - 1
    old = lines[first : last + 1]
    head = old[0].encode()[: node.col_offset].decode()
    tail = old[-1].encode()[node.end_col_offset :].decode()
    if isinstance(node, ast.stmt):
        if head.strip() or tail.partition("#")[0].strip():
            return None  # several statements on a line
        if isinstance(node, ast.If) and node.orelse and not edit.text:
            new = old[: node.body[-1].end_lineno - first]
        else:
            new = [f"{head}{edit.text or 'pass'}\n"]
    else:
        new = split_lines(head + edit.text + tail, keepends=True)
    whole = lines[begin - 1 : first] + new + lines[last + 1 : end]
    if new == old or not python_source.is_block("".join(whole)):
        return None
    return Lines(first + 1, tuple(old), tuple(new))
