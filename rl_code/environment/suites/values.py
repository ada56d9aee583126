"""Assertions of a suite that can be checked by value, by the split grader.

``assert double(2) == 4`` in a test without fixtures, with ``double`` imported from the repository,
says all that there is to know: a call with plain arguments and the value that it must give. So does
``assert twice == double(x)`` in a test that is parametrized with plain values (``rows``). The split
grader can repeat it without the expected value in reach of the candidate. Where the suite says that
the test passed, both must agree.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rl_code.environment.suites.canaries import function_of
from rl_code.environment.suites.literals import is_literal
from rl_code.environment.suites.rows import rows
from rl_code.environment.suites.sites import name_of
from rl_code.environment.suites.source import SuiteFile, source_of

# Assertions of one grading that are repeated, at most.
MOST = 12
# Error of the split grader about a call that was made and gave another value.
_OTHER_VALUE = re.compile(r"AssertionError.* \(.* returned .*\)", re.DOTALL)
# Names in a test file that make tests depend on more than the text of their function.
_HIDDEN_STATE = re.compile(r"autouse|setup_|setUp|pytestmark|pytest_plugins|monkeypatch")


@dataclasses.dataclass(frozen=True)
class Value:
    """An assertion about one call of a function of the repository."""

    # Ids of the tests that make it.
    tests: tuple[str, ...]
    # The file, and the function in it.
    path: str
    entry_point: str
    # The assertion as ``Tests.code`` takes it.
    statement: str


def values(
    files: Mapping[str, str],
    ids: Sequence[str],
    paths: Collection[str],
    configured: Sequence[str],
    new: Iterable[str] = (),
) -> list[Value]:
    """The assertions of tests that can be checked by value, in the order of ``ids``.

    files: path -> text of the test files that are known. paths: of the repository, as its task has
    them. configured: texts of the files conftest.py; where they hold fixtures for all tests,
    nothing is checked. new: paths of modules that may be elsewhere where the repository has none.
    """
    if any(_HIDDEN_STATE.search(text) for text in configured):
        return []
    functions: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for one in ids:
        functions.setdefault(function_of(one), []).append(one)
    sources: dict[str, SuiteFile | None] = {}
    found = []
    made_since = set(new)
    for (path, names), own in functions.items():
        if path not in sources:
            sources[path] = _plain_source(files.get(path))
        source = sources[path]
        node = source and source.function(names)
        if not source or not node:
            continue
        bound = imports(source.tree.body)
        for one, row in rows(source, node, own).items():
            for call, statement in _assertions(map(_Put(row).visit, copy.deepcopy(node.body))):
                place = _place(call, bound, paths, made_since)
                if place is not None:
                    found.append(Value((one,), *place, _statement(call, place[1], statement)))
    return found


def gives_another_value(error: str) -> bool:
    """True if an error of the split grader says that a call gave another value."""
    return _OTHER_VALUE.fullmatch(error) is not None


def _plain_source(text: str | None) -> SuiteFile | None:
    """A test file at whose top nothing happens but imports and definitions; else None."""
    source = None if text is None or _HIDDEN_STATE.search(text) else source_of(text)
    for node in source.tree.body if source else ():
        match node:
            case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.ClassDef():
                continue
            case ast.Expr(ast.Constant()):
                continue
            case ast.Assign(value=value) if is_literal(value):
                continue
        return None
    return source


def imports(nodes: Iterable[ast.AST]) -> dict[str, tuple[str, str]]:
    """Name, perhaps with dots -> module that it comes from and its name there; "" for a module
    itself.
    """
    bound: dict[str, tuple[str, str]] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name] = (alias.name, "")
    return bound


def files_of(module: str) -> list[str]:
    """Paths that the file of a module may have, at the root of a repository or below src, in the
    order in which Python looks for them.
    """
    base = module.replace(".", "/")
    return [
        path for root in ("", "src/") for path in (f"{root}{base}/__init__.py", f"{root}{base}.py")
    ]


class _Put(ast.NodeTransformer):
    """Puts values where arguments are read."""

    def __init__(self, row: Mapping[str, ast.expr]):
        self._row = row

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._row.get(node.id, node)


def _assertions(body: Iterable[ast.stmt]) -> Iterator[tuple[ast.Call, ast.stmt]]:
    """The call of each assertion of a test that consists of nothing else, and the assertion as a
    statement without pytest, of those that can be checked by value.
    """
    found = []
    for statement in body:
        match statement:
            case ast.Expr(ast.Constant()) | ast.Pass():
                continue
            case ast.Assert(ast.Compare(ast.Call() as call, [ast.Eq()], [expected]), _):
                test = statement.test
            case ast.Assert(ast.Compare(expected, [ast.Eq()], [ast.Call() as call]), _):
                test = ast.Compare(call, [ast.Eq()], [expected])
            case ast.Assert():
                continue
            case ast.Expr(
                ast.Call(ast.Attribute(ast.Name("self"), "assertEqual"), [call, expected])
            ):
                test = ast.Compare(call, [ast.Eq()], [expected])
            case ast.With(
                items=[ast.withitem(ast.Call(asks, [ast.Name(error)], []), None)],
                body=[ast.Expr(ast.Call() as call)],
            ) if name_of(asks) in ("raises", "assertRaises") and hasattr(builtins, error):
                if _is_plain(call):
                    found.append((call, _expecting(call, error)))
                continue
            case _:
                return
        if isinstance(call, ast.Call) and _is_plain(call) and is_literal(expected):
            found.append((call, ast.Assert(test, None)))
    yield from found


def _expecting(call: ast.Call, error: str) -> ast.Try:
    """A statement that passes if the call raises."""
    handler = ast.ExceptHandler(ast.Name(error), None, [ast.Pass()])
    failing = ast.Raise(ast.Call(ast.Name("AssertionError"), [ast.Constant("no exception")], []))
    return ast.Try([ast.Expr(call)], [handler], [failing], [])


def _is_plain(call: ast.Call) -> bool:
    """True if all arguments are literals."""
    keywords = [keyword.value for keyword in call.keywords if keyword.arg]
    return len(keywords) == len(call.keywords) and all(map(is_literal, [*call.args, *keywords]))


def _place(
    call: ast.Call,
    bound: Mapping[str, tuple[str, str]],
    paths: Collection[str],
    new: Collection[str],
) -> tuple[str, str] | None:
    """File and name of the function that is called, if it is one of the repository; of the files in
    ``new`` the one that Python finds first.
    """
    match call.func:
        case ast.Name(name) if bound.get(name, ("", ""))[1]:
            module, name = bound[name]
        case ast.Attribute(ast.Name(outer), name) if outer in bound:
            module = ".".join(filter(None, bound[outer]))
        case _:
            return None
    places = files_of(module)
    found = [path for path in places if path in paths]
    if not found:
        found = [path for path in places if path in new][:1]
    # which of several is imported depends on settings
    return (found[0], name) if len(found) == 1 else None


def _statement(call: ast.Call, entry_point: str, statement: ast.stmt) -> str:
    """The text of an assertion that calls the function by its own name."""
    call.func = ast.Name(entry_point)
    return ast.unparse(ast.fix_missing_locations(statement))
