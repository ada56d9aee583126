"""run_tests: runs the visible tests on the file as it stands and says what failed.

The texts come from pure functions (``failed_case``, ``failed_code``, ``describe``), so that
demonstrations can be written in exactly the words of an episode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_code.environment.grader import run_cases
from rl_code.environment.grading import Target, mark, targets
from rl_code.environment.tools.text import one_line, show
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Case, Tests

_WIDTH = 60
_VERBOSE_WIDTH = 400
_VERBOSE_FAILURES = 3


def call_of(entry_point: str, case: Case) -> str:
    """The call of a value-level test: ``f([3, 1])``."""
    return f"{entry_point}({', '.join(map(show, case.args))})"


def failed_case(entry_point: str, case: Case, shown: str, error: str, *, verbose: bool) -> str:
    """One failing value-level test on one line: ``f([3, 1]) gave [4, 2] want [5, 3]`` or ``f([3,
    1]) error ...``.

    shown: what the call returned, as ``text.show`` writes it; not looked at when ``error`` (what it
    raised, in short) is not "".
    """
    width = _VERBOSE_WIDTH if verbose else _WIDTH
    call = one_line(call_of(entry_point, case), width)
    if error:
        return f"{call} {'raised' if verbose else 'error'} {one_line(error, width)}"
    got = one_line(shown, width)
    want = one_line(show(case.expected), width)
    return (
        f"{call} returned {got}, expected {want}" if verbose else f"{call} gave {got} want {want}"
    )


def failed_code(statement: str, error: str, *, verbose: bool) -> str:
    """One failing test on one line, a statement or an id of a suite: ``assert f(2) == 4 error
    AssertionError``.
    """
    width = _VERBOSE_WIDTH if verbose else _WIDTH
    return (
        f"{one_line(statement, width)} {'failed:' if verbose else 'error'} {one_line(error, width)}"
    )


def describe(failures: Sequence[str], total: int, runs_left: int, *, verbose: bool) -> str:
    """Result of a run of ``total`` tests, for the model to read; ``failures`` are the texts of
    those that failed, in order.

    Short: ``PASS left 2`` or ``FAIL <first failure> left 2``. Long: counts and the first few
    failures.
    """
    if not verbose:
        return f"{f'FAIL {failures[0]}' if failures else 'PASS'} left {runs_left}"
    lines = [f"{total - len(failures)} of {total} visible tests passed."]
    lines += [f"FAILED {failure}" for failure in failures[:_VERBOSE_FAILURES]]
    if len(failures) > _VERBOSE_FAILURES:
        lines.append(f"({len(failures) - _VERBOSE_FAILURES} more failed)")
    return "\n".join([*lines, f"{runs_left} test runs left."])


def none_left(workspace: Workspace) -> Result:
    """The result of a call that needs a test run, where none is left."""
    return Result("no test runs left; submit" if workspace.verbose else "left 0", ok=False)


def run_visible(workspace: Workspace) -> list[str]:
    """Runs the visible tests on the files as they stand, which uses up a test run. Returns the
    texts of those that failed, in order. Raises SandboxFault.
    """
    workspace.test_runs_left -= 1
    task = workspace.task
    verbose = workspace.verbose
    tests = task.visible_tests
    failures = [
        failure
        for target in targets(task, tests)
        for failure in _failed_cases(workspace, target, workspace.timeout_s)
    ]
    # No canaries here and below: what passes pays nothing, and the agent reads what failed.
    if tests.code:
        code = Tests(code=tests.code)
        files = workspace.snapshot()
        marks = mark(task, code, files, workspace.pool, workspace.timeout_s, canaries=0)
        failures += [
            failed_code(statement, error, verbose=verbose)
            for statement, error in zip(tests.code, marks.errors, strict=True)
            if error
        ]
    if tests.suite is not None:
        suite = Tests(suite=tests.suite)
        files = workspace.snapshot()
        marks = mark(task, suite, files, workspace.pool, workspace.timeout_s, canaries=0)
        failures += [
            failed_code(test, error, verbose=verbose)
            for test, error in zip(tests.suite.ids, marks.errors, strict=True)
            if error
        ]
    workspace.tests_failed = bool(failures)
    return failures


@dataclasses.dataclass(frozen=True)
class RunTests(Tool):
    """Runs the visible tests on the file as it stands and says what failed."""

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "run_tests",
        "Run the visible tests on the current files and see which fail and why. The number of runs "
        "is limited; "
        "the answer says how many are left. Hidden tests decide after submit.",
        {},
        (),
    )
    words: ClassVar[Words | None] = Words("test")

    def failed(self, content: str, *, ok: bool) -> bool:
        return not ok or content.startswith("FAIL ") or "\nFAILED " in content

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        if workspace.test_runs_left == 0:
            return none_left(workspace)
        failures = run_visible(workspace)
        return Result(
            describe(
                failures,
                len(workspace.task.visible_tests),
                workspace.test_runs_left,
                verbose=workspace.verbose,
            )
        )


def _failed_cases(workspace: Workspace, target: Target, timeout_s: float) -> list[str]:
    """The visible cases of one function that fail, in words."""
    cases = [workspace.task.visible_tests.cases[i] for i in target.cases]
    if not cases:
        return []
    name = target.entry_point
    results = run_cases(workspace.sandbox, target.path, name, cases, timeout_s)
    return [
        failed_case(name, case, result.shown, result.error, verbose=workspace.verbose)
        for case, result in zip(cases, results, strict=True)
        if not result.passed
    ]
