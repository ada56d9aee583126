"""Grades work by a suite that pytest runs, in the candidate's own interpreter.

Each grading has a fresh sandbox over the task's world. Of the agent's work it holds what is not a
test and configures none (suites/applied.py), and over it the suite's own files. pytest runs without
plugins from outside and without caches, and a plugin of ours tells over a socket how each test
ended (suites/plugin.py, suites/runner.py). Exactly the tests of the suite must run, each once, and
pass; a skipped one has failed.

Where the candidate's code shares its process with the tests, it can forge whatever they say. Two
things tell: canaries (suites/canaries.py), copies of tests that no honest code passes beside their
originals, and values (suites/values.py), assertions of plain calls that the split grader repeats
without the expected values in reach of the candidate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Collection

from rl_code.environment.grader import grade
from rl_code.environment.sandbox.pool import SandboxPool, Snapshot
from rl_code.environment.suites.applied import Base, applied, laid_over
from rl_code.environment.suites.canaries import MOST, Drawn, draw
from rl_code.environment.suites.runner import Report, run_suite
from rl_code.environment.suites.values import MOST as MOST_VALUES
from rl_code.environment.suites.values import Value, gives_another_value, values
from rl_code.types import Suite, Task, Tests

# A canary and the test that it is a copy of both passed, twice.
CANARY_PASSED = "canary_passed"
# A test passed that asserts of a call what the split grader, which hides the expected value, found
# to be another value.
SUITE_DISAGREES = "suite_disagrees"
# Least seconds that a run gets, and those in which pytest must have started.
_LEAST_S = 1.0
_START_S = 30.0
_CONTRADICTED = "passed, and so did a copy of it that expects another value"
_DISAGREES = "passed, but not where the expected value is out of reach: "


class SuiteError(ValueError):
    """A suite that cannot be run in its task's world; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Graded:
    """What a suite came to."""

    # One for each of its ids: "" if it passed, or why not.
    errors: tuple[str, ...]
    # "canary_passed", "suite_disagrees" and "forged_result" prove cheating; "timeout", "killed" and
    # "exited" say how a run ended.
    flags: tuple[str, ...]
    # Canaries that stood in the first run.
    canaries: int = 0
    # Wall-clock.
    seconds: float = 0.0


def grade_suite(
    task: Task,
    suite: Suite,
    work: Snapshot,
    pool: SandboxPool,
    timeout_s: float,
    canaries: int = MOST,
) -> Graded:
    """Runs a suite of a task on work: all files, or in a world the difference from it.

    timeout_s: for all that is run, but what has begun then may take a few seconds. canaries: how
    many tests are copied, at most; 0 where the result pays nothing. Raises SandboxFault, and
    SuiteError where the world cannot run pytest.
    """
    start = time.monotonic()
    with contextlib.closing(Base(task, pool)) as base:
        grading = _Grading(task, suite, pool, base, timeout_s, canaries)
        errors, flags, drawn = grading.grade(work)
    return Graded(
        tuple(errors[one] for one in suite.ids),
        tuple(sorted(flags)),
        len(drawn.kinds),
        time.monotonic() - start,
    )


class _Grading:
    """One grading of one suite."""

    def __init__(
        self,
        task: Task,
        suite: Suite,
        pool: SandboxPool,
        base: Base,
        timeout_s: float,
        canaries: int,
    ):
        self._task = task
        self._suite = suite
        self._pool = pool
        self._base = base
        self._deadline = time.monotonic() + timeout_s
        self._canaries = canaries
        # Nobody else can foresee what is drawn.
        self._rng = random.SystemRandom()

    def grade(self, work: Snapshot) -> tuple[dict[str, str], set[str], Drawn]:
        """Id -> "" or why not, flags, and the canaries of the first run."""
        files = applied(self._task, self._suite, work, self._base)
        drawn = self._draw(())
        report = self._run(files, drawn)
        errors = {own: report.errors[one] for one, own in drawn.tests.items()}
        flags = set(report.flags)
        contradicted = contradictions(report, drawn)
        if contradicted:
            flags |= self._confirm(files, contradicted, errors)
        if self._canaries:
            flags |= self._compare(files, errors)
        return errors, flags, drawn

    def _draw(self, first: Collection[str]) -> Drawn:
        """New canaries, in tests ``first`` before others."""
        texts = self._texts() if self._canaries else {}
        preferred = first or self._suite.fail_to_pass
        return draw(texts, self._suite.ids, self._rng, self._canaries, tuple(preferred))

    def _texts(self) -> dict[str, str]:
        """Path -> text of the files that tests are in."""
        paths = dict.fromkeys(one.partition("::")[0] for one in self._suite.ids)
        own = self._suite.files
        texts = {path: own[path] if path in own else self._base.text(path) for path in paths}
        return {path: text for path, text in texts.items() if text is not None}

    def _run(self, files: Snapshot, drawn: Drawn) -> Report:
        """A run of the suite in a sandbox of its own; another one where that is lost, by the
        machine's doing or the candidate's. Code that brings its sandbox down does so again.
        """
        report, lost = self._try_run(files, drawn)
        if lost:
            report, _ = self._try_run(files, drawn)
        if not report.started:
            self._blame()
        return report

    def _try_run(self, files: Snapshot, drawn: Drawn) -> tuple[Report, bool]:
        """What a run of the suite says, and whether its sandbox was lost."""
        ids = [*drawn.tests, *drawn.canaries]
        laid = {**self._suite.files, **drawn.files}
        try:
            whole = laid_over(self._task, files, laid.items())
            sandbox = self._pool.open(whole, self._task.world)
        except ValueError as error:  # files made to fit no other workspace
            return Report(dict.fromkeys(ids, str(error)), True, frozenset(), ""), False
        with sandbox:
            left_s = max(self._deadline - time.monotonic(), _LEAST_S)
            return run_suite(sandbox, self._suite.command, ids, left_s), sandbox.lost

    def _blame(self) -> None:
        """Raises SuiteError where pytest does not even start without the agent's work."""
        bare = laid_over(self._task, self._task.files, self._suite.files.items())
        with self._pool.open(bare, self._task.world) as sandbox:
            alone = run_suite(sandbox, self._suite.command, (), _START_S)
        if alone.started:
            return
        said = " ".join(alone.printed.split())[-300:] or "nothing"
        needs = (
            "; the task's world needs a layer of packages with pytest (python -m launch.layers)"
            if "pytest" in said
            else ""
        )
        command = " ".join(self._suite.command)
        raise SuiteError(
            f"the suite of task {self._task.id} cannot be run: {command!r} says {said!r}{needs}"
        )

    def _confirm(
        self, files: Snapshot, contradicted: Collection[str], errors: dict[str, str]
    ) -> set[str]:
        """Looks again at tests that passed together with their canaries, with new ones; changes
        ``errors`` and returns flags.

        Code whose results change from call to call could pass both by accident, so only what
        happens twice, and not to the reference, is proof. Tests that passed once have failed,
        unless the reference passes them together with their canaries as well.
        """
        drawn = self._draw(contradicted)
        report = self._run(files, drawn)
        for one, own in drawn.tests.items():
            errors[own] = errors[own] or report.errors[one]
        again = contradictions(report, drawn)
        if again and self._task.reference:
            # canaries that no honest code fails prove nothing
            blunt = contradictions(self._run(self._solved(), drawn), drawn)
            again -= blunt
            contradicted = set(contradicted) - blunt
        for own in contradicted:
            errors[own] = _CONTRADICTED
        return {*report.flags, *([CANARY_PASSED] if again else [])}

    def _solved(self) -> Snapshot:
        """The reference, as work that is graded."""
        solved = {**self._task.files, **self._task.reference}
        return applied(self._task, self._suite, solved, self._base)

    def _compare(self, files: Snapshot, errors: dict[str, str]) -> set[str]:
        """Repeats assertions of tests that passed by value; changes ``errors`` and returns flags.

        What the reference passes there, the work must pass as well. Without a reference nobody
        knows whether a call can be made there at all, so only other values count.
        """
        found = self._values(files)
        found = [value for value in found if not any(errors[one] for one in value.tests)]
        found = self._rng.sample(found, min(len(found), MOST_VALUES))
        failed, flags = self._by_value(found, files)
        if self._task.reference:
            unsure, _ = self._by_value(list(failed), self._solved()) if failed else ({}, set())
            failed = {value: error for value, error in failed.items() if value not in unsure}
        for value, error in failed.items():
            if other := gives_another_value(error):
                flags.add(SUITE_DISAGREES)
            if other or self._task.reference:
                for one in value.tests:
                    errors[one] = _DISAGREES + error
        return flags

    def _values(self, files: Snapshot) -> list[Value]:
        """The assertions that can be checked by value."""
        paths = self._base.paths() | files.keys()
        tests = [path for path in self._suite.files if path.endswith("conftest.py")]
        configured = {path for path in paths if path.endswith("conftest.py")} | set(tests)
        texts = [self._suite.files.get(path) or self._base.text(path) or "" for path in configured]
        return values(self._texts(), self._suite.ids, paths, texts)

    def _by_value(self, found: list[Value], files: Snapshot) -> tuple[dict[Value, str], set[str]]:
        """What the split grader says of assertions that fail there, and its proofs of cheating."""
        failed = {}
        flags: set[str] = set()
        for place in dict.fromkeys((value.path, value.entry_point) for value in found):
            here = [value for value in found if (value.path, value.entry_point) == place]
            code = Tests(code=tuple(value.statement for value in here))
            left_s = max(self._deadline - time.monotonic(), _LEAST_S)
            graded = grade(*place, code, files, self._pool, left_s, self._task.world)
            flags |= {"lying_value", "forged_result"} & set(graded.flags)
            for value, error in zip(here, graded.errors, strict=True):
                if error:
                    failed[value] = error
        return failed, flags


def contradictions(report: Report, drawn: Drawn) -> set[str]:
    """Ids of tests that passed although their canaries did."""
    passed = {drawn.tests[one] for one in drawn.tests if not report.errors[one]}
    return {own for one, own in drawn.canaries.items() if not report.errors[one]} & passed
