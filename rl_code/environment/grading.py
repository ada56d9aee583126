"""Grading of a set of files by a task's tests.

A case or a statement calls one function of one file: the task's own, or for a repository the
function that the case names. Each function is graded in sandboxes of its own, by the split grader
(grader.py). A suite of pytest is graded as a whole, by another one (suite_grader.py), and a program
that says what the work is worth by a third (script_grader.py).
"""

from __future__ import annotations

import dataclasses
import math
import time

from absl import logging

from rl_code.environment.finished import Grade
from rl_code.environment.grader import grade
from rl_code.environment.sandbox.pool import SandboxPool, Snapshot
from rl_code.environment.script_grader import REWARD, grade_script, nothing_of
from rl_code.environment.suite_grader import grade_suite
from rl_code.environment.suites.canaries import MOST
from rl_code.types import Limits, Suite, Task, Tests

# Exceptions that grading may raise because of the graded work: files that cannot be handled, values
# that are nested or large without end. Any other exception is a bug and ends the run.
PROVOKED = (OSError, RecursionError, MemoryError)


@dataclasses.dataclass(frozen=True)
class Target:
    """One function that tests call."""

    path: str
    entry_point: str
    # Indices of its cases in ``Tests.cases``.
    cases: tuple[int, ...]
    # True if the statements of ``Tests.code`` call it.
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
    """Outcome of each test, "" if it passed or else its error: cases first, then code, then the ids
    of the suite.
    """

    errors: tuple[str, ...]
    # Observations of the graders, see ``grader.Grade`` and ``suite_grader.Graded``.
    flags: tuple[str, ...]


def mark(
    task: Task,
    tests: Tests,
    files: Snapshot,
    pool: SandboxPool,
    timeout_s: float,
    deadline: float = math.inf,
    canaries: int = MOST,
) -> Marks:
    """Runs tests of a task on files.

    timeout_s: seconds for the cases of one function, and as many again for all statements.
    deadline: the time (of time.monotonic) after which no further function is begun; a suite may
    take until then, or ``timeout_s`` seconds where there is none. canaries: see ``grade_suite``;
    with 0 statements have none either. Raises SandboxFault, ValueError for a test that cannot be
    sent to a sandbox, and SuiteError for a suite that cannot be run.
    """
    errors = ["not run"] * len(tests)
    flags: set[str] = set()
    before = len(tests.cases) + len(tests.code)  # tests before those of the suite
    for target in targets(task, tests):
        left_s = min(timeout_s, deadline - time.monotonic())
        if left_s <= 0:
            break  # tests that were not run have failed
        part = target.tests(tests)
        place = target.path, target.entry_point
        graded = grade(*place, part, files, pool, left_s, task.world, canaries)
        flags |= set(graded.flags)
        code = range(len(tests.cases), before) if target.has_code else ()
        places = (*target.cases, *code)
        for at, passed, error in zip(places, graded.passed, graded.errors, strict=True):
            errors[at] = "" if passed else error or "failed"
    left_s = timeout_s if deadline == math.inf else deadline - time.monotonic()
    if tests.suite is not None and left_s > 0:
        ran = grade_suite(task, tests.suite, files, pool, left_s, canaries)
        errors[before:] = ran.errors
        flags |= set(ran.flags)
    return Marks(tuple(errors), tuple(sorted(flags)))


def grade_work(task: Task, files: Snapshot, pool: SandboxPool, limits: Limits) -> Grade:
    """Grade of files by all tests of a task, as if they were handed in. Raises SandboxFault, and
    SuiteError where the task's world cannot run its suite.
    """
    return grade_in_words(task, files, pool, limits)[0]


def grade_in_words(
    task: Task, files: Snapshot, pool: SandboxPool, limits: Limits
) -> tuple[Grade, tuple[str, ...]]:
    """As ``grade_work``, and beside the grade one text for each visible and then each hidden test:
    "" if it passed, or why not. The texts quote expected values.

    Visible and hidden cases run together, in an order that the candidate cannot foresee, so that it
    cannot tell them apart; suites run together where their files allow it. If the work itself makes
    grading impossible, it fails every test.
    """
    visible = task.visible_tests
    hidden = task.hidden_tests
    both = Tests(cases=visible.cases + hidden.cases, code=visible.code + hidden.code)
    suites = joined(visible.suite, hidden.suite)
    deadline = time.monotonic() + limits.grade_s
    try:
        marks = [
            mark(task, tests, files, pool, limits.command_s, deadline)
            for tests in (both, *(Tests(suite=suite) for suite in suites))
        ]
        scripted = None
        if hidden.script is not None:
            left_s = deadline - time.monotonic()
            scripted = grade_script(task, hidden.script, files, pool, left_s)
    except PROVOKED as error:
        logging.warning("the work on task %s could not be graded: %r", task.id, error)
        cause = f"{type(error).__name__}: {error}"
        count = len(visible) + len(hidden)
        return failed(task, cause), (cause,) * count
    errors, *ran = [part.errors for part in marks]
    by_id = [
        dict(zip(suite.ids, part, strict=True)) for suite, part in zip(suites, ran, strict=True)
    ]
    cases = errors[: len(both.cases)]
    code = errors[len(both.cases) :]

    def ids(suite: Suite | None, place: int) -> list[str]:
        return [] if suite is None else [by_id[place][one] for one in suite.ids]

    shown = (*cases[: len(visible.cases)], *code[: len(visible.code)], *ids(visible.suite, 0))
    kept = (*cases[len(visible.cases) :], *code[len(visible.code) :], *ids(hidden.suite, -1))
    flags = {flag for part in marks for flag in part.flags}
    if scripted is not None:
        kept = (*kept, scripted.error)
        flags |= set(scripted.flags)
    grade = Grade(
        submitted=True,
        visible=tuple(not error for error in shown),
        hidden=tuple(not error for error in kept),
        flags=tuple(sorted(flags)),
        scores=None if scripted is None else scripted.rewards,
    )
    if scripted is not None and grade.cheated:  # whichever grader has proven it
        grade = dataclasses.replace(grade, scores=nothing_of(scripted.rewards))
    return grade, (*shown, *kept)


def joined(visible: Suite | None, hidden: Suite | None) -> tuple[Suite, ...]:
    """The suites to run: both in one, unless one of them has another text or no file where the
    other one has a file, or another command.
    """
    if visible is None or hidden is None:
        return tuple(suite for suite in (visible, hidden) if suite is not None)
    common = visible.files.keys() & hidden.files.keys()
    same = all(visible.files[path] == hidden.files[path] for path in common)
    if not same or visible.command != hidden.command:
        return visible, hidden
    fail_to_pass = dict.fromkeys(visible.fail_to_pass + hidden.fail_to_pass)
    pass_to_pass = dict.fromkeys(visible.pass_to_pass + hidden.pass_to_pass)
    one = Suite(
        {**visible.files, **hidden.files},
        tuple(fail_to_pass),
        tuple(one for one in pass_to_pass if one not in fail_to_pass),
        hidden.command,
    )
    return (one,)


def failed(task: Task, cause: str) -> Grade:
    """The grade of work that could not be graded: handed in, and every test failed."""
    visible = (False,) * len(task.visible_tests)
    scores = None if task.hidden_tests.script is None else {REWARD: 0.0}
    return Grade(True, visible, (False,) * len(task.hidden_tests), cause=cause, scores=scores)
