"""Where in a test function an expected value can be changed so that the test must fail.

A site is an assertion that a solution which passes the test reaches for certain, and behind which
nothing but assertions follow: so the changed test does everything that the real one does, and fails
at its end. A change is chosen by the type of what is expected: another number, another string, one
element more or less, the other truth value, another exception. Nothing else of the function's text
changes.

The candidate may read all texts and know this file. So a change of a value is one that may be made
the other way round as well: no text says of itself that it is the changed one. A change of a truth
value is written in the test and in its canary alike: ``bool(x) is True`` and ``bool(x) is False``,
or ``(not (x)) is False`` and ``(not (x)) is True``. Their form says nothing, but what ``x`` means
may. Where that or more tells, the site is marked as ``told``. A comparison with what is not written
out has a further canary then, which compares with another value of the same kind (``unlike``).
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence

from rl_code.environment.suites.literals import is_literal, other_values
from rl_code.environment.suites.source import Site, Source
from rl_code.environment.suites.unlike import unlike

# Calls after which a test may end without having failed.
_LEAVES = {"skip", "skipTest", "xfail", "importorskip", "exit", "subTest", "fail"}
_RAISES = {"raises", "assertRaises"}
# Exceptions that stand for each other.
_EXCEPTIONS = ("ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "OSError")
# Methods of unittest that ask for a truth value: the condition of their arguments, and its value.
_TRUTHS = {
    "assertTrue": ("{}", True),
    "assertFalse": ("{}", False),
    "assertIn": ("({}) in ({})", True),
    "assertNotIn": ("({}) in ({})", False),
    "assertIsNone": ("({}) is None", True),
    "assertIsNotNone": ("({}) is None", False),
}
# Expressions whose truth value can be asked for in other words.
_CONDITIONS = (
    *(ast.Compare, ast.BoolOp, ast.Call, ast.Name, ast.Attribute, ast.Subscript, ast.UnaryOp),
)
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


def sites(source: Source, node: ast.FunctionDef, rng: random.Random) -> list[Site]:
    """Places where a usable test function can be made to fail."""
    return [
        site
        for statement in _tail(node.body)
        for site in _of_statement(source, statement, rng)
        if all(_parses(source, node, site, text) for text in (site.real, site.others[0]))
    ]


def _parses(source: Source, node: ast.FunctionDef, site: Site, text: str) -> bool:
    """Whether a function with a text in it is Python. A canary that is not would take all tests
    of its file with it.
    """
    start, end = source.lines(node)
    data = source.data[start : site.start] + text.encode() + source.data[site.end : end]
    # below a line that makes its indentation right
    whole = ("if True:\n" if node.col_offset else "") + data.decode()
    try:
        ast.parse(whole)
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


def _of_statement(source: Source, statement: ast.stmt, rng: random.Random) -> Iterator[Site]:
    match statement:
        case ast.Assert(test):
            yield from _of_test(source, test, rng)
        case ast.With(items=[ast.withitem(ast.Call(_, [asked, *_]), _)]):
            yield from _of_exception(source, asked, rng)
        case ast.Expr(ast.Call(ast.Attribute(_, name), [left, right, *_])) if name in _EQUAL:
            for side in (right, left):
                yield from other_values(source, side, rng)
        case ast.Expr(ast.Call(ast.Attribute(_, name), [asked, *_])) if name in _RAISES:
            yield from _of_exception(source, asked, rng)
        case ast.Expr(ast.Call(ast.Attribute(_, name), asked, []) as call) if name in _TRUTHS:
            form, wanted = _TRUTHS[name]
            asked = asked[: form.count("{}")]
            plain = not any(isinstance(one, ast.Starred) for one in asked)
            if plain and len(asked) == form.count("{}"):
                condition = form.format(*(_text(source, one) for one in asked))
                texts = _truth(condition, rng, wanted=wanted)
                calls = [f"self.assertIs({text}, {value})" for text, value in texts]
                yield Site(*source.span(call), calls[0], (calls[1],), "truth", told=True)


def _of_test(source: Source, test: ast.expr, rng: random.Random) -> Iterator[Site]:
    """Sites in what stands behind ``assert``."""
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
    if isinstance(test, _CONDITIONS):
        condition, wanted = _condition(source, test)
        texts = [f"{text} is {value}" for text, value in _truth(condition, rng, wanted=wanted)]
        others = (texts[1], *_of_unlike(source, test, condition, texts[0]))
        yield Site(*source.span(test), texts[0], others, "truth", told=True)


def _of_unlike(source: Source, test: ast.expr, condition: str, real: str) -> Iterator[str]:
    """What asks for a value unlike the expected one, where that is not written out: an object that
    equals everything fails only where the other truth value is asked for.
    """
    match test:
        case ast.Compare(left, [ast.Eq()], [right]) if not is_literal(left):
            other = f"({_text(source, left)}) == {unlike(_text(source, right))}"
            yield real.replace(condition, other, 1)


def _condition(source: Source, test: ast.expr) -> tuple[str, bool]:
    """The text of a condition and the value that is asked for, where ``not``, ``not in`` and ``is
    not`` are left to the value. ``!=`` stays, because a class may define it in its own way.
    """
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            condition, wanted = _condition(source, operand)
            return condition, not wanted
        case ast.Compare(left, [ast.In() | ast.NotIn() as operator], [right]):
            word, wanted = "in", isinstance(operator, ast.In)
        case ast.Compare(left, [ast.Is() | ast.IsNot() as operator], [right]):
            word, wanted = "is", isinstance(operator, ast.Is)
        case _:
            return _text(source, test), True
    return f"({_text(source, left)}) {word} ({_text(source, right)})", wanted


def _truth(condition: str, rng: random.Random, *, wanted: bool) -> list[tuple[str, bool]]:
    """A truth value as an expression, beside the value that the test asks for, and beside the other
    one. Which form it has is drawn.
    """
    if rng.random() < 0.5:
        text = f"bool({condition})"
    else:
        text = f"(not ({condition}))"
        wanted = not wanted
    return [(text, wanted), (text, not wanted)]


def _text(source: Source, node: ast.expr) -> str:
    start, end = source.span(node)
    return source.data[start:end].decode()


def _of_exception(source: Source, asked: ast.expr, rng: random.Random) -> Iterator[Site]:
    """Other exceptions than the one asked for."""
    if not isinstance(asked, ast.Name | ast.Attribute):
        return
    name = name_of(asked)
    if name in ("Exception", "BaseException", "LookupError", "EnvironmentError"):
        return
    others = [one for one in _EXCEPTIONS if one != name]
    told = name not in _EXCEPTIONS or isinstance(asked, ast.Attribute)
    if told:  # many of one kind would only show better which one is of another kind
        others = [rng.choice(others)]
    yield Site(*source.span(asked), _text(source, asked), tuple(others), "exception", told)


def name_of(node: ast.expr) -> str:
    """The last name of what is called or raised: ``raises`` of ``pytest.raises(...)``."""
    match node:
        case ast.Call(function):
            return name_of(function)
        case ast.Attribute(_, name) | ast.Name(name):
            return name
    return ""
