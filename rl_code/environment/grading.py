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
    """What became of each test: cases first, then code."""

    errors: tuple[str, ...]
    # What the grader noticed, see ``grader.Grade``.
    flags: tuple[str, ...]


def mark(
    task: Task,
    tests: Tests,
    files: Snapshot,
    pool: SandboxPool,
    timeout_s: float,
    deadline: float = math.inf,
) -> Marks:
    """Runs tests of a task on files.

    timeout_s: seconds for the cases of one function, and as many again for all statements.
    deadline: the time (of time.monotonic) after which no further function is begun. Raises
    SandboxFault, and ValueError for a test that cannot be sent to a sandbox.
    """
    errors = ["not run"] * len(tests)
    flags: set[str] = set()
    for target in targets(task, tests):
        left_s = min(timeout_s, deadline - time.monotonic())
        if left_s <= 0:
            break  # tests that were not run have failed
        part = target.tests(tests)
        graded = grade(target.path, target.entry_point, part, files, pool, left_s, task.world)
        flags |= set(graded.flags)
        code = range(len(tests.cases), len(tests)) if target.has_code else ()
        places = (*target.cases, *code)
        for at, passed, error in zip(places, graded.passed, graded.errors, strict=True):
            errors[at] = "" if passed else error or "failed"
    return Marks(tuple(errors), tuple(sorted(flags)))


def grade_work(task: Task, files: Snapshot, pool: SandboxPool, limits: Limits) -> Grade:
    """What all tests of a task make of files, as if they were handed in. Raises SandboxFault.

    Visible and hidden cases run together, in an order that the candidate cannot foresee, so that it
    cannot tell them apart. If the work itself makes grading impossible, it fails every test.
    """
    visible = task.visible_tests
    hidden = task.hidden_tests
    both = Tests(cases=visible.cases + hidden.cases, code=visible.code + hidden.code)
    deadline = time.monotonic() + limits.grade_s
    try:
        marks = mark(task, both, files, pool, limits.command_s, deadline)
    except _PROVOKED as error:
        logging.warning("the work on task %s could not be graded: %r", task.id, error)
        return failed(task, f"{type(error).__name__}: {error}")
    passed = [not error for error in marks.errors]
    cases = passed[: len(both.cases)]
    code = passed[len(both.cases) :]
    return Grade(
        submitted=True,
        visible=(*cases[: len(visible.cases)], *code[: len(visible.code)]),
        hidden=(*cases[len(visible.cases) :], *code[len(visible.code) :]),
        flags=marks.flags,
    )


def failed(task: Task, cause: str) -> Grade:
    """The grade of work that could not be graded: handed in, and every test failed."""
    visible = (False,) * len(task.visible_tests)
    return Grade(True, visible, (False,) * len(task.hidden_tests), cause=cause)
