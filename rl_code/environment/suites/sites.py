"""Places in a test function where an expected value can be changed so that the test must fail.

A site is an assertion that a solution which passes the test reaches for certain, and behind which
nothing but assertions follow: so the changed test does everything that the real one does, and fails
at its end. It may stand in a loop over something that is written out, and then fails in its first
round. A change is chosen by the type of what is expected: another number, another word, one element
more or less, the other truth value, another exception. Nothing else of the function's text changes.

The value may stand in the assertion, or in an assignment for the assertion alone. It may be a part
of what is expected: an element of a list, the beginning of a text, a phrase that a text or the
message of an exception must hold, one of several conditions.

The candidate may read all texts and know this file. So a change of a value is one that may be made
the other way round as well: no text says of itself that it is the changed one. A change of a truth
value is written in the test and in its canary alike: ``bool(x) is True`` and ``bool(x) is False``,
or ``(not (x)) is False`` and ``(not (x)) is True``. Their form says nothing, but what ``x`` means
may. Where that or more tells, the site is marked as ``told``. A comparison with what is not written
out has a further canary then, which compares with another value of the same kind (``unlike``).
"""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections.abc import Iterator, Sequence

from rl_code.environment.suites.alike import Look
from rl_code.environment.suites.literals import is_literal, other_values
from rl_code.environment.suites.source import Site, SuiteFile
from rl_code.environment.suites.unlike import unlike
from rl_code.text import python_source

# Calls after which a test may end without having failed, or fails where no exception says so.
_LEAVES = {"exit", "subTest", "fail"}
# Marks that do not change how a test ends once it runs.
_MARKS = re.compile(r"(pytest\.)?mark\.(skipif\(|(?!skip|xfail|flaky))")
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
# Functions of numpy.testing that compare their first two arguments, with and without tolerance.
_NEAR = {"assert_allclose", "assert_almost_equal", "assert_array_almost_equal"}
_SAME = {"assert_array_equal", "assert_equal"}
# Least difference of numbers that are compared with a tolerance.
_FAR = 0.02
# Words that a phrase has at least.
_PHRASE = 2
# Draws of a beginning that is as long as the real one. One in twenty-five finds none.
_TRIES = 8
_EQUAL = {"assertEqual", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertIs"}


def usable(source: SuiteFile, node: ast.FunctionDef) -> bool:
    """True if a test function runs straight to its end, or fails."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Name):  # a mark under a name of the file's own
            decorator = assigned(source.tree.body, decorator.id) or decorator
        if not _MARKS.match(ast.unparse(decorator)):
            return False
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and name_of(inner.func) in _LEAVES:
            return False
    leaving = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await)
    return not any(isinstance(inner, leaving) for inner in _own(node.body))


def _own(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes of a body, without those of functions that it defines."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def assigned(body: Sequence[ast.stmt], name: str) -> ast.expr | None:
    """Expression that a body assigns to a name, if it does so once."""
    found = [
        node.value
        for node in body
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]
    return found[0] if len(found) == 1 else None


def sites(source: SuiteFile, node: ast.FunctionDef, rng: random.Random) -> list[Site]:
    """Places where a usable test function can be made to fail."""
    finder = tail_of(source, node, rng)
    return [
        site
        for statement in finder.tail(node.body)
        for site in finder.of_statement(statement)
        if all(_parses(source, node, site, text) for text in (site.real, site.others[0]))
    ]


def tail_of(source: SuiteFile, node: ast.FunctionDef, rng: random.Random) -> Finder:
    """Search for sites in a test function."""
    look = Look(source.block(node).decode(), source.tokens)
    return Finder(source, node, rng, look)


def _parses(source: SuiteFile, node: ast.FunctionDef, site: Site, text: str) -> bool:
    """True if a function with a text in it is valid Python. An invalid canary would take all tests
    of its file with it.
    """
    start, end = source.lines(node)
    data = source.data[start : site.start] + text.encode() + source.data[site.end : end]
    return python_source.is_block(data.decode())


class Finder:
    """Looks for sites in one test function."""

    def __init__(self, source: SuiteFile, node: ast.FunctionDef, rng: random.Random, look: Look):
        self._source = source
        self._node = node
        self._rng = rng
        self.look = look

    def tail(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        """The assertions at the end of a body, and of blocks that end it: ``with``, ``try`` without
        handlers, and loops that have a first round.
        """
        for statement in reversed(body):
            if _is_assertion(statement):
                yield statement
                continue
            match statement:
                case ast.With(items, inner) if all(map(_lets_through, items)):
                    yield from self.tail(inner)
                case ast.Try(inner, [], []):
                    yield from self.tail(inner)
                case ast.For(_, over, inner, []) if self._has_rounds(over):
                    jumps = ast.Break | ast.Continue
                    if not any(isinstance(one, jumps) for one in _own(inner)):
                        yield from self.tail(inner)
            return

    def _has_rounds(self, over: ast.expr) -> bool:
        """True if a loop over this expression has a round for certain."""
        match over:
            case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
                return any(not isinstance(one, ast.Starred) for one in elements)
            case ast.Dict(keys):
                return any(keys)
            case ast.Constant(str(text)):
                return bool(text)
            case ast.Call(ast.Name("range"), [ast.Constant(int(count))], []):
                return count > 0
            case ast.Call(ast.Name("enumerate" | "sorted" | "list" | "reversed"), [inner, *_]):
                return self._has_rounds(inner)
            case ast.Call(ast.Name("zip"), several) if several:
                return all(map(self._has_rounds, several))
            case ast.Call(ast.Attribute(inner, "items" | "keys" | "values"), [], []):
                return self._has_rounds(inner)
            case ast.Name(name):
                bodies = (self._node.body, self._source.tree.body)
                uses = [one for one in ast.walk(self._node) if _is_named(one, name)]
                found = [assigned(body, name) for body in bodies]
                value = found[0] if found[0] is not None else found[1]
                # what is used elsewhere in the test may be changed there
                few = len(uses) == (2 if found[0] is not None else 1)
                return few and value is not None and self._has_rounds(value)
        return False

    def of_statement(self, statement: ast.stmt) -> Iterator[Site]:
        match statement:
            case ast.Assert(test):
                yield from self._of_test(test)
                yield from self._of_truth(test)
            case ast.With(items=[ast.withitem(ast.Call(_, asked, more), _)]):
                yield from self._of_raises(asked[:1], more)
            case ast.Expr(ast.Call(ast.Attribute(_, name), [left, right, *_])) if name in _EQUAL:
                for side in (right, left):
                    yield from self._of_value(side)
            case ast.Expr(ast.Call(ast.Attribute(_, name), asked, more)) if name in _RAISES:
                yield from self._of_raises(asked[:1], more)
            case ast.Expr(ast.Call(ast.Attribute(_, name), [left, right], more)) if (
                name in _NEAR | _SAME and all(map(_is_small, more))
            ):
                for side in (right, left):
                    yield from self._of_value(side, far=_FAR)
            case ast.Expr(ast.Call(ast.Attribute(_, name), asked, []) as call) if name in _TRUTHS:
                if name == "assertIn" and len(asked) > 1:
                    yield from self._of_phrase(asked[0])
                form, wanted = _TRUTHS[name]
                asked = asked[: form.count("{}")]
                plain = not any(isinstance(one, ast.Starred) for one in asked)
                if plain and len(asked) == form.count("{}"):
                    condition = form.format(*(_text(self._source, one) for one in asked))
                    texts = _truth(condition, self._rng, wanted=wanted)
                    calls = [f"self.assertIs({text}, {value})" for text, value in texts]
                    span = self._source.span(call)
                    yield Site(*span, calls[0], (calls[1],), "truth", told=True)

    def _of_value(self, side: ast.expr, *, far: float | None = None) -> Iterator[Site]:
        """Other values for one side of a comparison that is written out, or that is the name of
        something which is written out for it alone.
        """
        if isinstance(side, ast.Name):
            value = assigned(self._node.body, side.id)
            uses = [one for one in ast.walk(self._node) if _is_named(one, side.id)]
            if value is None or len(uses) != 2:
                return
            side = value
        yield from other_values(self._source, side, self._rng, self.look, far=far)

    def _of_test(self, test: ast.expr) -> Iterator[Site]:
        """Sites in what stands behind ``assert``."""
        match test:
            case ast.BoolOp(ast.And(), conditions):
                for condition in conditions:
                    yield from self._of_test(condition)
            case ast.Compare(left, [ast.Eq()], [right]):
                if is_literal(left) and is_literal(right):
                    return
                for side in (right, left):
                    if isinstance(side, ast.Call) and name_of(side.func) == "approx":
                        if len(side.args) == 1 and not side.keywords:
                            yield from self._of_value(side.args[0], far=0.0)
                    else:
                        yield from self._of_value(side)
            case ast.Compare(_, [ast.Is()], [ast.Constant(bool()) as right]):
                yield from self._of_value(right)
            case ast.Compare(left, [ast.In()], [right]) if not is_literal(right):
                yield from self._of_phrase(left)
            case ast.Call(ast.Attribute(_, "startswith" | "endswith"), [asked], []):
                yield from self._of_end(asked)

    def _of_end(self, asked: ast.expr) -> Iterator[Site]:
        """Other beginnings or ends that a text must have, as long as the real one: of two texts of
        one length, one begins with one at most.
        """
        if not isinstance(asked, ast.Constant):
            return
        for _ in range(_TRIES):
            found = False
            for site in self._of_value(asked):
                same = [len(one) == len(site.real) for one in site.others]
                kept = [one for one, fits in zip(site.others, same, strict=True) if fits]
                if kept:
                    found = True
                    alike = sum(same[: site.alike])
                    yield dataclasses.replace(site, others=tuple(kept), alike=alike)
            if found:
                return

    def _of_phrase(self, asked: ast.expr) -> Iterator[Site]:
        """Other words in a phrase that a text must hold. A phrase of several words: that a text
        holds two of them which differ in one word is out of the question.
        """
        match asked:
            case ast.Constant(str(text)) if len(re.findall(r"[A-Za-z]{2,}", text)) >= _PHRASE:
                for site in self._of_value(asked):
                    yield site if site.kind != "truth" else dataclasses.replace(site, told=True)

    def _of_raises(self, asked: Sequence[ast.expr], more: Sequence[ast.keyword]) -> Iterator[Site]:
        for keyword in more:
            if keyword.arg == "match":
                yield from self._of_phrase(keyword.value)
        for exception in asked:
            yield from _of_exception(self._source, exception, self._rng)

    def _of_truth(self, test: ast.expr) -> Iterator[Site]:
        """The other truth value of what stands behind ``assert``."""
        if isinstance(test, _CONDITIONS):
            condition, wanted = _condition(self._source, test)
            values = _truth(condition, self._rng, wanted=wanted)
            texts = [f"{text} is {value}" for text, value in values]
            others = [texts[1], *_of_unlike(self._source, test, condition, texts[0])]
            self._rng.shuffle(others)
            yield Site(*self._source.span(test), texts[0], tuple(others), "truth", told=True)


def _is_small(tolerance: ast.keyword) -> bool:
    """True if an argument is a tolerance far below ``_FAR``, or no tolerance."""
    match tolerance:
        case ast.keyword("rtol" | "atol", ast.Constant(int() | float() as value)):
            return value <= _FAR / 10
    return tolerance.arg in ("err_msg", "verbose", "strict")


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _lets_through(item: ast.withitem) -> bool:
    """True if the errors of a block leave it. A name may stand for a ``pytest.raises`` that is
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
        case ast.Expr(ast.Call(ast.Attribute(_, name))):  # of numpy.testing
            return name in _NEAR or name in _SAME
        case ast.With(items=[ast.withitem(ast.Call(function), _)]):
            return name_of(function) in _RAISES
    return False


def _of_unlike(source: SuiteFile, test: ast.expr, condition: str, real: str) -> Iterator[str]:
    """Conditions that ask for a value unlike the expected one, where that is not written out: an
    object that equals everything fails only where the other truth value is asked for.
    """
    match test:
        case ast.Compare(left, [ast.Eq()], [right]) if not is_literal(left):
            other = f"({_text(source, left)}) == {unlike(_text(source, right))}"
            yield real.replace(condition, other, 1)


def _condition(source: SuiteFile, test: ast.expr) -> tuple[str, bool]:
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


def _text(source: SuiteFile, node: ast.expr) -> str:
    start, end = source.span(node)
    return source.data[start:end].decode()


def _of_exception(source: SuiteFile, asked: ast.expr, rng: random.Random) -> Iterator[Site]:
    """Other exceptions than the one asked for."""
    if not isinstance(asked, ast.Name | ast.Attribute):
        return
    name = name_of(asked)
    if name in ("Exception", "BaseException", "LookupError", "EnvironmentError"):
        return
    others = [one for one in _EXCEPTIONS if one != name]
    # Some are raised far more often than others, so several would only show which one is real.
    other = (rng.choice(others),)
    yield Site(*source.span(asked), _text(source, asked), other, "exception", told=True)


def name_of(node: ast.expr) -> str:
    """The last name of what is called or raised: ``raises`` of ``pytest.raises(...)``."""
    match node:
        case ast.Call(function):
            return name_of(function)
        case ast.Attribute(_, name) | ast.Name(name):
            return name
    return ""
