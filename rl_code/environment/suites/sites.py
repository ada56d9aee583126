"""Where in a test function an expected value can be changed so that the test must fail.

A site is an assertion that a solution which passes the test reaches for certain, and behind which
nothing but assertions follow: so the changed test does everything that the real one does, and fails
at its end. A change is chosen by the type of what is expected: another number, another string, one
element more or less, the other truth value, another exception. Nothing else of the function's text
changes.

The candidate may read both texts and know this file. So a change of a value is one that may be made
the other way round as well: neither text says of itself that it is the changed one. Where only
other changes can be made, they are marked as ``told``.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence

from rl_code.environment.suites.literals import is_literal, other_values
from rl_code.environment.suites.source import Change, Source

# Calls after which a test may end without having failed.
_LEAVES = {"skip", "skipTest", "xfail", "importorskip", "exit", "subTest", "fail"}
_RAISES = {"raises", "assertRaises"}
# Exceptions that stand for each other.
_EXCEPTIONS = ("ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "OSError")
_FLIPS = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_OTHER_NAMES = {
    "assertTrue": "assertFalse",
    "assertFalse": "assertTrue",
    "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
    "assertIsNone": "assertIsNotNone",
    "assertIsNotNone": "assertIsNone",
}
_EQUAL = {"assertEqual", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertIs"}


def usable(node: ast.FunctionDef) -> bool:
    """Whether a test function runs straight to its end, or fails."""
    for decorator in node.decorator_list:
        if not re.match(r"(pytest\.)?mark\.(?!skip|xfail|flaky)", ast.unparse(decorator)):
            return False
    for inner in ast.walk(node):
        if isinstance(inner, ast.Return | ast.Yield | ast.YieldFrom | ast.Await):
            return False
        if isinstance(inner, ast.Call) and name_of(inner.func) in _LEAVES:
            return False
    return True


def changes(source: Source, node: ast.FunctionDef, rng: random.Random) -> list[Change]:
    """Ways to make a usable test function fail."""
    return [
        change
        for statement in _tail(node.body)
        for change in _of_statement(source, statement, rng)
        if _parses(source, node, change)
    ]


def _parses(source: Source, node: ast.FunctionDef, change: Change) -> bool:
    """Whether a function with a change in it is Python. A canary that is not would take all tests
    of its file with it.
    """
    start, end = source.lines(node)
    data = source.data[start : change.start] + change.text.encode() + source.data[change.end : end]
    # below a line that makes its indentation right
    text = ("if True:\n" if node.col_offset else "") + data.decode()
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _tail(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The assertions at the end of a body, and in blocks ``with`` that end it."""
    for statement in reversed(body):
        if _is_assertion(statement):
            yield statement
            continue
        if isinstance(statement, ast.With) and all(map(_lets_through, statement.items)):
            yield from _tail(statement.body)
        return


def _lets_through(item: ast.withitem) -> bool:
    """Whether the errors of a block leave it. A name may stand for a ``pytest.raises`` that is
    among the parameters of a test.
    """
    context = item.context_expr
    return isinstance(context, ast.Call) and name_of(context) not in {"suppress", *_RAISES}


def _is_assertion(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assert():
            return True
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), name))):
            return name.startswith("assert")
        case ast.With(items=[ast.withitem(ast.Call(function), _)]):
            return name_of(function) in _RAISES
    return False


def _of_statement(source: Source, statement: ast.stmt, rng: random.Random) -> Iterator[Change]:
    match statement:
        case ast.Assert(test):
            yield from _of_test(source, test, rng)
        case ast.With(items=[ast.withitem(ast.Call(_, [asked, *_]), _)]):
            yield from _of_exception(source, asked, rng)
        case ast.Expr(ast.Call(ast.Attribute(_, name) as function, [left, right, *_])) if (
            name in _EQUAL
        ):
            for side in (right, left):
                yield from other_values(source, side, rng)
        case ast.Expr(ast.Call(ast.Attribute(_, name), [asked, *_])) if name in _RAISES:
            yield from _of_exception(source, asked, rng)
        case ast.Expr(ast.Call(ast.Attribute(_, name) as function, _)) if name in _OTHER_NAMES:
            _, end = source.span(function)
            yield Change(end - len(name.encode()), end, _OTHER_NAMES[name], "truth", told=True)


def _of_test(source: Source, test: ast.expr, rng: random.Random) -> Iterator[Change]:
    """Changes of what stands behind ``assert``."""
    match test:
        case ast.Compare(left, [ast.Eq() | ast.Is() as operator], [right]):
            sides = [side for side in (right, left) if is_literal(side)]
            if len(sides) == 1 and not isinstance(operator, ast.Is):
                yield from other_values(source, sides[0], rng)
            elif (
                len(sides) == 1
                and isinstance(sides[0], ast.Constant)
                and (isinstance(sides[0].value, bool))
            ):
                yield from other_values(source, sides[0], rng)
            elif (
                isinstance(right, ast.Call)
                and name_of(right.func) == "approx"
                and (len(right.args) == 1 and not right.keywords)
            ):
                yield from other_values(source, right.args[0], rng, far=True)
            yield from _flipped(source, left, operator, right)
        case ast.Compare(left, [operator], [right]):
            yield from _flipped(source, left, operator, right)
        case ast.UnaryOp(ast.Not(), _):
            # the operand may stand in parentheses, which its place does not tell
            start, end = source.span(test)
            word = re.match(rb"not\b\s*", source.data[start:end])
            assert word is not None
            yield Change(start, start + word.end(), "", "truth", told=True)
        case ast.Call() | ast.Name() | ast.Attribute() | ast.Subscript():
            start, _ = source.span(test)
            yield Change(start, start, "not ", "truth", told=True)


def _flipped(
    source: Source, left: ast.expr, operator: ast.cmpop, right: ast.expr
) -> Iterator[Change]:
    """The other truth value of a comparison."""
    start = source.span(left)[1]
    end = source.span(right)[0]
    between = source.data[start:end].decode()
    words = re.fullmatch(r"(\s*)([!=<>]+|is\s+not|is|not\s+in|in)(\s*)", between)
    if words is not None:
        flip = _FLIPS[type(operator)]
        text = f"{words[1] or ' '}{flip}{words[3] or ' '}"
        yield Change(start, end, text, "truth", told=True)


def _of_exception(source: Source, asked: ast.expr, rng: random.Random) -> Iterator[Change]:
    """Another exception than the one asked for."""
    if not isinstance(asked, ast.Name | ast.Attribute):
        return
    name = name_of(asked)
    if name in ("Exception", "BaseException", "LookupError", "EnvironmentError"):
        return
    start, end = source.span(asked)
    other = rng.choice([one for one in _EXCEPTIONS if one != name])
    yield Change(start, end, other, "exception", told=name not in _EXCEPTIONS)


def name_of(node: ast.expr) -> str:
    """The last name of what is called or raised: ``raises`` of ``pytest.raises(...)``."""
    match node:
        case ast.Call(function):
            return name_of(function)
        case ast.Attribute(_, name) | ast.Name(name):
            return name
    return ""
