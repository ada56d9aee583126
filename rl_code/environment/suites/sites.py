"""Where in a test function an expected value can be changed so that the test must fail.

A site is an assertion that a solution which passes the test reaches for certain, and behind which
nothing but assertions follow: so the changed test does everything that the real one does, and fails
at its end. A change is chosen by the type of what is expected: another number, another string, one
element less, the other truth value, another exception. Nothing else of the function's text changes.
"""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections.abc import Iterator, Sequence

# Calls after which a test may end without having failed.
_LEAVES = {"skip", "skipTest", "xfail", "importorskip", "exit", "subTest", "fail"}
_RAISES = {"raises", "assertRaises"}
# Exceptions that stand for each other, in the order in which tests ask for them.
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


@dataclasses.dataclass(frozen=True)
class Change:
    """A piece of a file's text, in bytes, and what stands there instead. kind: "number", "string",
    "length", "truth" or "exception".
    """

    start: int
    end: int
    text: str
    kind: str


class Source:
    """A test file: its text and syntax tree. Raises SyntaxError and ValueError for no Python."""

    def __init__(self, text: str):
        self.data = text.encode()
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def place(self, line: int, column: int) -> int:
        """The offset in bytes of a place as syntax trees name it."""
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node begins and ends, in bytes."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.place(node.lineno, node.col_offset)
        return start, self.place(node.end_lineno, node.end_col_offset)

    def lines(self, node: ast.FunctionDef) -> tuple[int, int]:
        """Where the lines of a function begin and end, those of its decorators included."""
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        assert node.end_lineno is not None
        return self._starts[first - 1], self._starts[node.end_lineno]

    def function(self, names: Sequence[str]) -> ast.FunctionDef | None:
        """The test function of this name, behind those of its classes, if there is just one."""
        body: list[ast.stmt] = self.tree.body
        for name in names:
            found = [
                node
                for node in body
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
                and node.name == name
            ]
            if len(found) != 1 or isinstance(found[0], ast.AsyncFunctionDef):
                return None
            body = found[0].body
        return found[0] if names and isinstance(found[0], ast.FunctionDef) else None


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
    """Ways to make a usable test function fail, those that change a value first."""
    found = [
        change
        for statement in _tail(node.body)
        for change in _of_statement(source, statement, rng)
        if _parses(source, node, change)
    ]
    return sorted(found, key=lambda change: change.kind == "truth")


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
                yield from _of_value(source, side, rng)
        case ast.Expr(ast.Call(ast.Attribute(_, name), [asked, *_])) if name in _RAISES:
            yield from _of_exception(source, asked, rng)
        case ast.Expr(ast.Call(ast.Attribute(_, name) as function, _)) if name in _OTHER_NAMES:
            _, end = source.span(function)
            yield Change(end - len(name.encode()), end, _OTHER_NAMES[name], "truth")


def _of_test(source: Source, test: ast.expr, rng: random.Random) -> Iterator[Change]:
    """Changes of what stands behind ``assert``."""
    match test:
        case ast.Compare(left, [ast.Eq() | ast.Is() as operator], [right]):
            sides = [side for side in (right, left) if is_literal(side)]
            if len(sides) == 1 and not isinstance(operator, ast.Is):
                yield from _of_value(source, sides[0], rng)
            elif (
                len(sides) == 1
                and isinstance(sides[0], ast.Constant)
                and (isinstance(sides[0].value, bool))
            ):
                yield from _of_value(source, sides[0], rng)
            elif (
                isinstance(right, ast.Call)
                and name_of(right.func) == "approx"
                and (len(right.args) == 1 and not right.keywords)
            ):
                yield from _of_value(source, right.args[0], rng, far=True)
            yield from _flipped(source, left, operator, right)
        case ast.Compare(left, [operator], [right]):
            yield from _flipped(source, left, operator, right)
        case ast.UnaryOp(ast.Not(), _):
            # the operand may stand in parentheses, which its place does not tell
            start, end = source.span(test)
            word = re.match(rb"not\b\s*", source.data[start:end])
            assert word is not None
            yield Change(start, start + word.end(), "", "truth")
        case ast.Call() | ast.Name() | ast.Attribute() | ast.Subscript():
            start, _ = source.span(test)
            yield Change(start, start, "not ", "truth")


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
        yield Change(start, end, f"{words[1] or ' '}{flip}{words[3] or ' '}", "truth")


def _of_exception(source: Source, asked: ast.expr, rng: random.Random) -> Iterator[Change]:
    """Another exception than the one asked for."""
    if not isinstance(asked, ast.Name | ast.Attribute):
        return
    others = [name for name in _EXCEPTIONS if name != name_of(asked)]
    if name_of(asked) in ("Exception", "BaseException", "LookupError", "EnvironmentError"):
        return
    start, end = source.span(asked)
    yield Change(start, end, rng.choice(others), "exception")


def _of_value(
    source: Source, node: ast.expr, rng: random.Random, *, far: bool = False
) -> Iterator[Change]:
    """Another value for a literal: of one constant in it, or one element less.

    far: farther away than any tolerance.
    """
    if not is_literal(node):
        return
    before = ast.literal_eval(node)
    leaves = [leaf for leaf in _leaves(node) if not isinstance(leaf.value, type(None))]
    rng.shuffle(leaves)
    for leaf in leaves[:3]:
        start, end = source.span(leaf)
        old = source.data[start:end].decode()
        new, kind = _other(leaf.value, old, rng, far=far)
        if new and _differs(before, _replaced(source, node, start, end, new)):
            yield Change(start, end, new, kind)
    if isinstance(node, ast.List) and len(node.elts) > 1:
        start = source.span(node.elts[-2])[1]
        end = source.span(node.elts[-1])[1]
        if _differs(before, _replaced(source, node, start, end, "")):
            yield Change(start, end, "", "length")
    if isinstance(node, ast.List) and not node.elts:
        start, end = source.span(node)
        yield Change(start, end, rng.choice(("[0]", "[None]", "['']")), "length")
    if isinstance(node, ast.Dict) and not node.keys:
        start, end = source.span(node)
        yield Change(start, end, rng.choice(("{0: 0}", "{'': 0}")), "length")


def _other(value: object, old: str, rng: random.Random, *, far: bool) -> tuple[str, str]:
    """The text of another constant of the same type, and the kind of change; "" for none."""
    match value:
        case bool():
            return str(not value), "truth"
        case int():
            step = rng.choice((1, 2, 3, 10))
            lower = value - step if value >= step else value + step
            number = rng.choice((value + step, lower))
            return str(number + (abs(number) + 100 if far else 0)), "number"
        case float():
            number = value + rng.choice((0.5, 1.0, 1.5)) * (10 * abs(value) + 10 if far else 1)
            return (repr(number), "number") if abs(value) < 1e15 else ("", "")
        case str() | bytes():
            return _other_text(value, old, rng), "string"
    return "", ""


def _other_text(value: str | bytes, old: str, rng: random.Random) -> str:
    """The text of another string: one letter or digit of it is another one. "" for one that is
    written in a way in which this is not sure.
    """
    plain = re.fullmatch(r"""(b?)("[^"\\\n{}]*"|'[^'\\\n{}]*')""", old)
    if plain is None:
        return ""
    first = len(plain[1]) + 1
    if not value:
        return old[:first] + rng.choice("abcdexyz01") + old[first:]
    places = [i for i in range(first, len(old) - 1) if old[i].isalnum()]
    if not places:
        return ""
    at = rng.choice(places)
    alphabet = "0123456789" if old[at].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    new = rng.choice([letter for letter in alphabet if letter != old[at].lower()])
    return old[:at] + (new.upper() if old[at].isupper() else new) + old[at + 1 :]


def _replaced(source: Source, node: ast.expr, start: int, end: int, new: str) -> object:
    """The value of a literal with another text in it; None for what is no literal any more."""
    first, last = source.span(node)
    text = source.data[first:start] + new.encode() + source.data[end:last]
    try:
        return ast.literal_eval(text.decode().strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _differs(before: object, after: object) -> bool:
    """Whether two expected values are different, also for those who do not look at the case of
    letters or at space.
    """

    def plain(value: object) -> str:
        return "".join(repr(value).casefold().split())

    return after is not None and before != after and plain(before) != plain(after)


def is_literal(node: ast.expr) -> bool:
    """Whether an expression is a plain value written out."""
    if isinstance(node, ast.Tuple) and not node.elts:
        return False
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _leaves(node: ast.expr) -> Iterator[ast.Constant]:
    """The constants of a literal that are no keys."""
    match node:
        case ast.Constant():
            yield node
        case ast.Dict(_, values):
            for value in values:
                yield from _leaves(value)
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            for element in elements:
                yield from _leaves(element)
        case ast.UnaryOp(ast.USub(), operand):
            yield from _leaves(operand)


def name_of(node: ast.expr) -> str:
    """The last name of what is called or raised: ``raises`` of ``pytest.raises(...)``."""
    match node:
        case ast.Call(function):
            return name_of(function)
        case ast.Attribute(_, name) | ast.Name(name):
            return name
    return ""
