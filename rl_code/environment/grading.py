"""What a task's tests make of a set of files.

A test calls one function of one file: the task's own, or for a repository the function that its
case names. Each function is graded in sandboxes of its own, by the grader.
"""

from __future__ import annotations

import dataclasses
import math
import time

from absl import logging

from rl_code.environment.grader import grade
from rl_code.environment.sandbox.pool import SandboxPool, Snapshot
from rl_code.rewards.finished import Grade
from rl_code.types import Limits, Task, Tests

# What grading may raise through the work that is graded: files that cannot be handled, values that
# are nested or large without end. Any other exception is a bug and ends the run.
_PROVOKED = (OSError, RecursionError, MemoryError)


@dataclasses.dataclass(frozen=True)
class Target:
    """One function that tests call."""

    path: str
    entry_point: str
    # Indices of its cases in ``Tests.cases``.
    cases: tuple[int, ...]
    # Whether the statements of ``Tests.code`` call it.
    has_code: bool

    def tests(self, tests: Tests) -> Tests:
        """Its part of the tests."""
        cases = tuple(tests.cases[i] for i in self.cases)
        return Tests(cases, tests.code if self.has_code else ())


# Of tests that do not call a function at all.
_NO_TARGET = Target("", "", (), False)


def targets(task: Task, tests: Tests) -> list[Target]:
    """The functions that tests call, each once; the task's own first, others in order of their
    first case.
    """
    own = (task.path, task.entry_point)
    cases: dict[tuple[str, str], list[int]] = {own: []}
    for i, case in enumerate(tests.cases):
        path, _, entry_point = case.target.rpartition(":")
        place = (path, entry_point) if case.target else own
        cases.setdefault(place, []).append(i)
    return [
        Target(*place, tuple(indices), has_code=place == own)
        for place, indices in cases.items()
        if indices or (place == own and tests.code)
    ]


@dataclasses.dataclass(frozen=True)
class Marks:
    """What became of each test: "" where it passed, else why not; the cases first, then the code;
    after those of the tests, those of the hidden ones.
    """

    errors: tuple[str, ...]
    # What the grader noticed, see ``grader.Grade``.
    flags: tuple[str, ...]


def mark(
    task: Task,
    tests: Tests,
    files: Snapshot,
    pool: SandboxPool,
    timeout_s: float,
    hidden: Tests | None = None,
    deadline: float = math.inf,
) -> Marks:
    """Runs tests of a task on files.

    deadline: when, on the clock of time.monotonic, no further function is begun.
    hidden: tests to run in processes that have not seen the calls of ``tests``. timeout_s: for the
    cases of one function, and again for all statements. Raises SandboxFault, and ValueError for a
    test that cannot be sent to a sandbox.
    """
    parts = (tests, hidden or Tests())
    errors = [["not run"] * len(part) for part in parts]
    flags: set[str] = set()
    called = [{(one.path, one.entry_point): one for one in targets(task, part)} for part in parts]
    for path, entry_point in dict.fromkeys([*called[0], *called[1]]):
        left_s = min(timeout_s, deadline - time.monotonic())
        if left_s <= 0:
            break  # tests that were not run have failed
        at = [found.get((path, entry_point), _NO_TARGET) for found in called]
        first, second = (one.tests(part) for one, part in zip(at, parts, strict=True))
        graded = grade(path, entry_point, first, files, pool, left_s, second)
        flags |= set(graded.flags)
        outcomes = iter(zip(graded.passed, graded.errors, strict=True))
        for one, part, noted in zip(at, parts, errors, strict=True):
            code = range(len(part.cases), len(part)) if one.has_code else ()
            for index in (*one.cases, *code):
                passed, error = next(outcomes)
                noted[index] = "" if passed else error or "failed"
    return Marks((*errors[0], *errors[1]), tuple(sorted(flags)))


def grade_work(task: Task, files: Snapshot, pool: SandboxPool, limits: Limits) -> Grade:
    """What all tests of a task make of files, as if they were handed in. Raises SandboxFault.

    Work that cannot be graded for a reason of its own fails every test.
    """
    visible = task.visible_tests
    try:
        marks = mark(
            task,
            visible,
            files,
            pool,
            limits.command_s,
            task.hidden_tests,
            time.monotonic() + limits.grade_s,
        )
    except _PROVOKED as error:
        logging.warning("the work on task %s could not be graded: %r", task.id, error)
        return failed(task, f"{type(error).__name__}: {error}")
    passed = tuple(not error for error in marks.errors)
    return Grade(
        submitted=True,
        visible=passed[: len(visible)],
        hidden=passed[len(visible) :],
        flags=marks.flags,
    )


def failed(task: Task, cause: str) -> Grade:
    """The grade of work that could not be graded: handed in, and every test failed."""
    visible = (False,) * len(task.visible_tests)
    return Grade(True, visible, (False,) * len(task.hidden_tests), cause=cause)
