"""Survey of a package's tests, and of the functions of the package that each of them runs.

All tests run once, and it is noted which code each of them runs. Those that pass quickly run again,
with another seed of Python's hashes; only those that pass again are used.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
from collections.abc import Iterable, Mapping

from rl_code.tasks.makers import testfiles
from rl_code.tasks.makers.package import Package, PackageError
from rl_code.tasks.makers.runs import Outcome, Runner, SuiteRun

# CPU seconds of all tests together, and of one test function that is used.
_ALL_S = 240
_SLOW_S = 0.25
# Wall-clock seconds of all tests together.
_WAIT_S = 900.0
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class TestFunction:
    """A test function, which may stand for several tests (parameters, classes that inherit it)."""

    path: str
    # First line of its definition, counted from 1.
    line: int
    name: str
    # Ids as pytest writes them, sorted.
    ids: tuple[str, ...]
    # CPU seconds, all its tests together.
    seconds: float
    # Number of functions of the package that it runs.
    breadth: int
    __test__ = False  # for pytest: no test of ours


@dataclasses.dataclass(frozen=True)
class Function:
    """A function, method or class of the package that tests run."""

    path: str
    qualname: str
    # First line (of its decorators), and last one.
    line: int
    end: int
    # The tests that run it, the most specific first: those that run the fewest other functions.
    tests: tuple[TestFunction, ...]

    @property
    def key(self) -> str:
        """Its name in the package, as ``path:qualname``."""
        return f"{self.path}:{self.qualname}"


@dataclasses.dataclass(frozen=True)
class Survey:
    """Result of a survey of a package's tests."""

    functions: tuple[Function, ...]
    classes: tuple[Function, ...]
    # Lines that tests run, by path.
    lines: Mapping[str, frozenset[int]]
    tests: tuple[TestFunction, ...]


def survey(package: Package, runner: Runner) -> Survey:
    """Runs all tests of a package as it is. Raises PackageError when none is of use, and
    SandboxFault.
    """
    traced = _all(package, runner, package.tests, 0, traced=True)
    tests = _test_functions(package, traced, traced.passed())
    if tests:
        files = test_files(package, tests)
        again = _all(package, runner, files, 1, traced=False)
        tests = [test for test in tests if set(test.ids) <= again.passed()]
    if not tests:
        said = "; ".join(list(traced.errors.values())[:1]) or "none passed"
        raise PackageError(f"{package.pin.label}: no test passes in the sandbox ({said[:160]})")
    return _survey(package, traced, tests)


def test_files(package: Package, tests: Iterable[TestFunction]) -> dict[str, str]:
    """Parts of test files that hold some test functions, by path."""
    lines: dict[str, set[int]] = collections.defaultdict(set)
    for test in tests:
        lines[test.path].add(test.line)
    return {
        path: testfiles.part(package.tests[path], frozenset(kept))
        for path, kept in sorted(lines.items())
    }


def _all(
    package: Package, runner: Runner, files: Mapping[str, str], seed: int, *, traced: bool
) -> Outcome:
    job = SuiteRun("all", files, tuple(sorted(files)), _ALL_S, _WAIT_S, traced)
    outcome = runner.run(package.world, [job], seed)[job.name]
    if outcome.ending:
        raise PackageError(
            f"{package.pin.label}: its tests did not come to an end: {outcome.ending}"
        )
    return outcome


def _test_functions(
    package: Package, traced: Outcome, passed: frozenset[str]
) -> list[TestFunction]:
    """The test functions of which every test passed, quickly."""
    ids: dict[tuple[str, int], list[str]] = collections.defaultdict(list)
    for test, (path, line) in traced.trace["places"].items():
        ids[path, line].append(test)
    names = {
        path: {
            testfiles.first_line(node): node.name
            for node in ast.walk(testfiles.parse(text))
            if isinstance(node, _FUNCTIONS)
        }
        for path, text in package.tests.items()
    }
    found = []
    for (path, line), tests in sorted(ids.items()):
        seconds = sum(traced.seconds.get(test, 0.0) for test in tests)
        name = names.get(path, {}).get(line)
        # A test of another file runs a function of this one: both would need to be laid.
        here = all(test.partition("::")[0] == path for test in tests)
        if name and here and seconds <= _SLOW_S and set(tests) <= passed:
            calls = {call for test in tests for call in traced.trace["calls"].get(test, ())}
            function = TestFunction(path, line, name, tuple(sorted(tests)), seconds, len(calls))
            found.append(function)
    return found


def _survey(package: Package, traced: Outcome, tests: list[TestFunction]) -> Survey:
    started = traced.trace["functions"]
    # By path and first line of a piece of code: the tests that start it.
    starts: dict[tuple[str, int], set[TestFunction]] = collections.defaultdict(set)
    for test in tests:
        for name in test.ids:
            for call in traced.trace["calls"].get(name, ()):
                path, line = started[call]
                starts[path, line].add(test)
    functions: list[Function] = []
    classes: list[Function] = []
    for path, text in sorted(package.sources.items()):
        try:
            tree = testfiles.parse(text)
        except SyntaxError:
            continue
        here = {line: found for (where, line), found in starts.items() if where == path}
        for qualname, node in _definitions(tree):
            begin, end = testfiles.first_line(node), node.end_lineno
            found = {test for line in here if begin <= line <= end for test in here[line]}
            if found:
                ordered = sorted(found, key=lambda test: (test.breadth, test.path, test.line))
                function = Function(path, qualname, begin, end, tuple(ordered))
                (classes if isinstance(node, ast.ClassDef) else functions).append(function)
    lines = {path: frozenset(numbers) for path, numbers in traced.trace["lines"].items()}
    return Survey(tuple(functions), tuple(classes), lines, tuple(tests))


def _definitions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Functions and classes at the top of a module and in its classes, with qualified names; not
    those whose name is defined more than once.
    """
    found: list[tuple[str, ast.FunctionDef | ast.ClassDef]] = []

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                found.append((prefix + node.name, node))
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")

    walk(tree.body, "")
    counts = collections.Counter(name for name, _ in found)
    return [(name, node) for name, node in found if counts[name] == 1]
