"""Grades work by a suite that pytest runs, in the candidate's own interpreter.

Each grading has a fresh sandbox over the task's world. Of the agent's work it holds what is not a
test and configures none (suites/applied.py), and over it the suite's own files. pytest runs without
plugins from outside and without caches, and a plugin of ours tells over a socket how each test
ended (suites/plugin.py, suites/runner.py). Exactly the tests of the suite must run, each once, and
pass; a skipped one has failed.

Where the candidate's code shares its process with the tests, it can forge whatever they say. Two
things tell: canaries (suites/canaries.py), copies of tests that no honest code passes beside their
originals, and values (suites/values.py), assertions of plain calls that the split grader repeats
without the expected values in reach of the candidate. Tests that canaries leave in question are
looked at again without them (suites/again.py). Nothing that grading relies on is computed from the
agent's files.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Iterable, Mapping

from rl_code.environment.grader import grade
from rl_code.environment.sandbox.pool import SandboxPool, Snapshot
from rl_code.environment.suites.again import Again
from rl_code.environment.suites.applied import Base, applied, deleted, laid_over, solved
from rl_code.environment.suites.canaries import MOST, Drawn, draw, function_of, guarded
from rl_code.environment.suites.ids import from_workspace
from rl_code.environment.suites.runner import Report, run_suite
from rl_code.environment.suites.values import MOST as MOST_VALUES
from rl_code.environment.suites.values import Value, gives_another_value, values
from rl_code.types import Suite, Task, Tests

# A test passed that asserts of a call what the split grader, which hides the expected value, found
# to be another value.
SUITE_DISAGREES = "suite_disagrees"
# Begins the reason of a test that passed and counts as failed: nothing could have shown that it was
# forged, and tests of the same grading that can show it fail.
UNPROVEN = "passed, but could be forged: "
# Least seconds that a run gets, and those in which pytest must have started.
_LEAST_S = 1.0
_START_S = 30.0
_DISAGREES = "passed, but not where the expected value is out of reach: "


class SuiteError(ValueError):
    """A suite that cannot be run in its task's world; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Graded:
    """Result of grading with a suite."""

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
        tuple(errors.values()),
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
        self._suite = from_workspace(suite, base)
        self._named = dict(zip(self._suite.ids, suite.ids, strict=True))
        self._pool = pool
        self._base = base
        self._deadline = time.monotonic() + timeout_s
        self._canaries = canaries
        # Nobody else can foresee what is drawn.
        self._rng = random.SystemRandom()

    def grade(self, work: Snapshot) -> tuple[dict[str, str], set[str], Drawn]:
        """Id -> "" or why not, in the order of the suite's ids, flags, and the canaries of the
        first run.
        """
        files = applied(self._task, self._suite, work, self._base)
        texts = self._texts if self._canaries else {}
        drawn = draw(texts, self._suite.ids, self._rng, self._canaries, self._suite.fail_to_pass)
        report = self._run(files, drawn)
        ended = {own: report.errors[one] for one, own in drawn.tests.items()}
        errors = {own: ended[own] for own in self._suite.ids}
        again = Again(
            lambda drawn: self._run(files, drawn),
            (lambda drawn: self._run(self._solved, drawn)) if self._has_reference else None,
            texts,
            self._suite.ids,
            self._rng,
        )
        flags = {*report.flags, *again.look(report, drawn, errors)}
        if self._canaries:
            checked, proofs = self._compare(files, errors)
            flags |= proofs
            self._leave_unproven(errors, checked | set(drawn.canaries.values()))
        return errors, flags, drawn

    def _leave_unproven(self, errors: dict[str, str], checked: set[str]) -> None:
        """Lets tests of fail_to_pass fail that nothing has checked, where one fails that has been.

        Otherwise who forges them alone would be paid for a part of the tests. Honest work loses a
        part of its pay while tests that are checked still fail.
        """
        required = self._suite.fail_to_pass
        failed = next((own for own in required if errors[own] and own in checked), None)
        for own in required if failed else ():
            if not errors[own] and own not in checked:
                errors[own] = f"{UNPROVEN}it has no canary, and {self._named[failed]} fails"

    def unguarded(self) -> tuple[str, ...]:
        """See the function of this name."""
        by_value = {one for value in self._values() for one in value.tests}
        known = by_value | guarded(self._texts, self._suite.fail_to_pass)
        return tuple(self._named[one] for one in self._suite.fail_to_pass if one not in known)

    @functools.cached_property
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
        return self._without_skips(report, drawn) if report.skipped else report

    def _without_skips(self, report: Report, drawn: Drawn) -> Report:
        """The report, in which a test has failed that skipped a subtest that the reference does not
        skip, or without one the files that the agent started from.
        """
        errors = dict(report.errors)
        for one, own in {**drawn.tests, **drawn.canaries}.items():
            others = set(report.skipped.get(one, ())) - set(self._skipped.get(own, ()))
            if others and not errors[one]:
                errors[one] = f"a subtest was skipped: {min(others)}"
        return dataclasses.replace(report, errors=errors)

    @functools.cached_property
    def _skipped(self) -> Mapping[str, tuple[str, ...]]:
        """Test -> subtests that may be skipped."""
        known = self._solved if self._has_reference else self._task.files
        plain = Drawn({}, {one: one for one in self._suite.ids}, {})
        return self._try_run(known, plain)[0].skipped

    def _try_run(self, files: Snapshot, drawn: Drawn) -> tuple[Report, bool]:
        """Report of one run of the suite, and True if its sandbox was lost."""
        # files in the suite's order, so that what one of them changes for the next is the same in
        # every run
        in_order = dict.fromkeys(one.partition("::")[0] for one in self._suite.ids)
        places = {path: place for place, path in enumerate(in_order)}
        ids = [*drawn.tests, *drawn.canaries]
        ids.sort(key=lambda one: places[one.partition("::")[0]])
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

    @property
    def _has_reference(self) -> bool:
        return bool(self._task.reference or deleted(self._task))

    @functools.cached_property
    def _solved(self) -> Snapshot:
        """The reference, as work that is graded."""
        return applied(self._task, self._suite, solved(self._task), self._base)

    def _compare(self, files: Snapshot, errors: dict[str, str]) -> tuple[set[str], set[str]]:
        """Repeats assertions of tests that passed by value; changes ``errors`` and returns the
        tests and flags.

        What the reference passes there, the work must pass as well. Without a reference nobody
        knows whether a call can be made there at all, so only other values count.
        """
        found = self._values(() if self._has_reference else _kept(files))
        found = [value for value in found if not any(errors[one] for one in value.tests)]
        found = self._some(found)
        failed, flags = self._by_value(found, files)
        if self._has_reference:
            unsure, _ = self._by_value(list(failed), self._solved) if failed else ({}, set())
            failed = {value: error for value, error in failed.items() if value not in unsure}
        for value, error in failed.items():
            if other := gives_another_value(error):
                flags.add(SUITE_DISAGREES)
            if other or self._has_reference or not self._place(value.path, files):
                for one in value.tests:
                    errors[one] = _DISAGREES + error
        return {one for value in found for one in value.tests}, flags

    def _some(self, found: list[Value]) -> list[Value]:
        """Up to MOST_VALUES of the assertions, those of fail_to_pass first, and of a function with
        many rows no more than of others.
        """
        required = set(self._suite.fail_to_pass)
        of_function: collections.Counter[object] = collections.Counter()
        ordered = []
        for value in self._rng.sample(found, len(found)):
            function = function_of(value.tests[0])
            of_function[function] += 1
            ordered.append((required.isdisjoint(value.tests), of_function[function], value))
        ordered.sort(key=lambda one: one[:2])
        return [value for *_, value in ordered[:MOST_VALUES]]

    def _values(self, new: Iterable[str] = ()) -> list[Value]:
        """The assertions that can be checked by value, of functions of the task's modules.

        new: paths of modules that an agent may have made where no reference tells.
        """
        paths = (self._base.paths() | self._task.reference.keys()) - set(deleted(self._task))
        tests = [path for path in self._suite.files if path.endswith("conftest.py")]
        configured = {path for path in paths if path.endswith("conftest.py")} | set(tests)
        texts = [self._suite.files.get(path) or self._base.text(path) or "" for path in configured]
        return values(self._texts, self._suite.ids, paths, texts, new)

    def _by_value(self, found: list[Value], files: Snapshot) -> tuple[dict[Value, str], set[str]]:
        """Assertions that fail in the split grader, with errors, and its proofs of cheating."""
        failed = {}
        flags: set[str] = set()
        for called in dict.fromkeys((value.path, value.entry_point) for value in found):
            path, entry_point = called
            here = [value for value in found if (value.path, value.entry_point) == called]
            code = Tests(code=tuple(value.statement for value in here))
            left_s = max(self._deadline - time.monotonic(), _LEAST_S)
            place = self._place(path, files) or path
            graded = grade(place, entry_point, code, files, self._pool, left_s, self._task.world)
            flags |= {"lying_value", "forged_result"} & set(graded.flags)
            for value, error in zip(here, graded.errors, strict=True):
                if error:
                    failed[value] = error
        return failed, flags

    def _place(self, path: str, files: Snapshot) -> str:
        """Path of a module of the task in work that may have made a package of a file, or a file of
        a package; "" where the module is gone.
        """
        base = path.removesuffix(".py").removesuffix("/__init__")
        places = (f"{base}/__init__.py", f"{base}.py")
        there = _kept(files) | (self._base.paths() - files.keys() if self._task.world else set())
        return next((place for place in places if place in there), "")


def _kept(files: Snapshot) -> set[str]:
    """Paths of the files of work that are not deleted."""
    return {
        path for path, entry in files.items() if isinstance(entry, str) or entry.kind != "deleted"
    }


def passes(error: str) -> bool:
    """True for a test that passed, whether or not it counts (``UNPROVEN``)."""
    return not error or error.startswith(UNPROVEN)


def unguarded(task: Task, suite: Suite, pool: SandboxPool) -> tuple[str, ...]:
    """The tests of fail_to_pass whose results could be forged without a guess.

    They can have no canary that only the right value tells from its original, and say nothing that
    the split grader can check. Raises SandboxFault.
    """
    with contextlib.closing(Base(task, pool)) as base:
        grading = _Grading(task, suite, pool, base, _LEAST_S, MOST)
        return grading.unguarded()
