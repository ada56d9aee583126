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

from rl_code.environment.grader import grade
from rl_code.environment.sandbox.pool import SandboxPool, Snapshot
from rl_code.environment.suites.applied import Base, applied, laid_over
from rl_code.environment.suites.canaries import MOST, Drawn, draw, draw_alone, guarded
from rl_code.environment.suites.runner import Report, run_suite
from rl_code.environment.suites.values import MOST as MOST_VALUES
from rl_code.environment.suites.values import Value, gives_another_value, values
from rl_code.types import Suite, Task, Tests

# A test passed, and so did two changed copies of it, each in a sandbox of its own.
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
    # Test functions that had canaries in the first run.
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
        drawn = draw(
            self._texts() if self._canaries else {},
            self._suite.ids,
            self._rng,
            self._canaries,
            self._suite.fail_to_pass,
        )
        report = self._run(files, drawn)
        errors = {own: report.errors[one] for one, own in drawn.tests.items()}
        flags = set(report.flags)
        if passed_canaries(report, drawn):
            flags |= self._confirm(files, report, drawn, errors)
        if self._canaries:
            flags |= self._compare(files, errors)
        return errors, flags, drawn

    def unguarded(self) -> tuple[str, ...]:
        """See the function of this name."""
        paths = self._task.files
        by_value = {one for value in self._values(paths) for one in value.tests}
        known = by_value | guarded(self._texts(), self._suite.fail_to_pass)
        return tuple(one for one in self._suite.fail_to_pass if one not in known)

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
        # files in the suite's order, so that what one of them changes for the next is the same in
        # every run
        files_of = [one.partition("::")[0] for one in self._suite.ids]
        ids = [*drawn.tests, *drawn.canaries]
        ids.sort(key=lambda one: files_of.index(one.partition("::")[0]))
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
        self, files: Snapshot, first: Report, drawn: Drawn, errors: dict[str, str]
    ) -> set[str]:
        """Looks again at tests of which a canary passed; changes ``errors`` and returns flags.

        A canary that passes where its original fails may be an honest wrong answer: another value
        that is the expected one by accident. And code that remembers earlier calls may pass both.
        So the test stands alone now, in up to three more sandboxes: as it is, and with two other
        changed values. Honest code gives one value, so it passes one of the three at most. Who
        forges has nothing to compare it with, and must either pass all of them or give up the test.
        Passing all, where the reference did not pass the canaries of the first run, is proof.

        Tests that passed together with their canaries have failed, unless the reference passes
        both as well.
        """
        contradicted = contradictions(first, drawn)
        suspects = passed_canaries(first, drawn)
        used = set(drawn.texts)
        flags: set[str] = set()
        for changed in (False, True, True):
            if not suspects:
                break
            alone = draw_alone(
                self._texts(),
                self._suite.ids,
                self._rng,
                suspects,
                used,
                self._canaries,
                changed=changed,
            )
            used |= alone.texts
            report = self._run(files, alone)
            flags |= report.flags
            for one, own in alone.tests.items():
                errors[own] = errors[own] or report.errors[one]
            passed = passed_canaries(report, alone) if changed else set(_passed(report, alone))
            suspects = suspects & passed
        if self._has_reference and suspects | contradicted:
            # canaries that no honest code fails prove nothing
            blunt = passed_canaries(self._run(self._solved(), drawn), drawn)
            suspects = suspects - blunt
            contradicted = contradicted - blunt
        for own in suspects | contradicted:
            errors[own] = _CONTRADICTED
        return {*flags, *([CANARY_PASSED] if suspects else [])}

    @property
    def _has_reference(self) -> bool:
        return bool(self._task.reference or self._deleted())

    def _deleted(self) -> tuple[str, ...]:
        """Paths that the reference takes away."""
        return tuple(self._task.meta.get("deleted", ()))

    def _solved(self) -> Snapshot:
        """The reference, as work that is graded."""
        written = {**self._task.files, **self._task.reference}
        solved = laid_over(self._task, written, dict.fromkeys(self._deleted()).items())
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
        if self._has_reference:
            unsure, _ = self._by_value(list(failed), self._solved()) if failed else ({}, set())
            failed = {value: error for value, error in failed.items() if value not in unsure}
        for value, error in failed.items():
            if other := gives_another_value(error):
                flags.add(SUITE_DISAGREES)
            if other or self._has_reference:
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


def unguarded(task: Task, suite: Suite, pool: SandboxPool) -> tuple[str, ...]:
    """The tests of fail_to_pass whose results could be forged without a guess.

    They can have no canary that only the right value tells from its original, and say nothing that
    the split grader can check. Raises SandboxFault.
    """
    with contextlib.closing(Base(task, pool)) as base:
        grading = _Grading(task, suite, pool, base, _LEAST_S, MOST)
        return grading.unguarded()


def contradictions(report: Report, drawn: Drawn) -> set[str]:
    """Ids of tests that passed although one of their canaries did, or of which several canaries
    passed.
    """
    passed = [*_passed(report, drawn), *_passed_canaries(report, drawn)]
    return {own for own in passed if passed.count(own) > 1}


def passed_canaries(report: Report, drawn: Drawn) -> set[str]:
    """Ids of tests of which a canary passed."""
    return set(_passed_canaries(report, drawn))


def _passed_canaries(report: Report, drawn: Drawn) -> list[str]:
    return [own for one, own in drawn.canaries.items() if not report.errors[one]]


def _passed(report: Report, drawn: Drawn) -> list[str]:
    """Ids of tests that passed."""
    return [own for one, own in drawn.tests.items() if not report.errors[one]]
