"""Validation of a candidate as a task: tests that notice it, tests that are shown, and checks that
the task holds.

1. Nothing that the agent can read holds the answer: no other file has the lines that were changed.
2. The tests that run the changed function run on the changed package. Some must fail.
3. The test functions are parted: a few are visible, the others hidden. No test function is in both,
   none in one does what one in the other does, and no table of data is in both.
4. The hidden tests, the visible ones, and both together run on the changed package and on the
   package as it was, in two more sandboxes with other seeds of hashes and in another order. With
   the runs of step 2 and of the survey each test has run three times before and four times after:
   the same must fail before, and all pass after.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl_code.tasks.makers import testfiles, words
from rl_code.tasks.makers.candidate import Candidate, broken
from rl_code.tasks.makers.package import Package
from rl_code.tasks.makers.runs import Outcome, Runner, SuiteRun
from rl_code.tasks.makers.survey import TestFunction, test_files
from rl_code.text.lines import split_lines

# Why a candidate is no task.
NO_IMPORT = "the package or its tests cannot be imported"
UNNOTICED = "no test fails"
ALONE = "only one test function fails"
HANGS = "a test does not come to an end"
DIES = "the tests' interpreter ends"
COPY = "another file holds the answer"
SHARED = "visible and hidden tests would share data"
NOT_SOLVED = "not all tests pass with the reference"
UNSTABLE = "runs differ"
ONE_SIDED = "the hidden tests notice one of two faults only"
# Test functions of one function, the most specific ones, and their CPU seconds together.
_MOST_TESTS = 12
_MOST_S = 0.25
# Failing test functions from which two of them are visible instead of one.
_MANY = 6
# Lines of context with which a changed line is looked for in other files.
_CONTEXT = 2
_SIDES = ("hidden", "visible")
_BOTH = "both"
_WHEN = ("before", "after")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome of a candidate: a task, or the reason why it is none."""

    candidate: Candidate
    # One of the reasons above; "" for a task.
    reason: str
    # The task as a line of a file of tasks (``rl_code.tasks.made``).
    row: Mapping[str, Any] | None = None
    # Ids of all tests that fail, of a task.
    fails: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Parted:
    """A candidate whose tests are parted."""

    candidate: Candidate
    hidden: tuple[TestFunction, ...]
    visible: tuple[TestFunction, ...]
    # Ids that passed when all its tests ran on the changed package.
    passed: frozenset[str]

    def side(self, name: str) -> tuple[TestFunction, ...]:
        """The test functions that are hidden, visible, or both."""
        sides = {"hidden": self.hidden, "visible": self.visible}
        return sides.get(name, self.hidden + self.visible)


def validate(
    package: Package,
    candidates: Sequence[Candidate],
    runner: Runner,
    known: Mapping[tuple, frozenset[str]],
) -> list[Verdict]:
    """A verdict for each candidate. Raises SandboxFault.

    known: for every bug that is a part of a candidate, by its first change, the tests that fail.
    """
    reasons: dict[str, str] = {}
    tried = []
    for candidate in candidates:
        if _copied(package, candidate):
            reasons[candidate.id] = COPY
        else:
            tried.append(candidate)
    jobs = [_job(package, one.id, one, _tests(one), "before") for one in tried]
    outcomes = runner.run(package.world, jobs) if jobs else {}
    parted: list[_Parted] = []
    for candidate in tried:
        found = _part(package, candidate, outcomes[candidate.id], known)
        if isinstance(found, _Parted):
            parted.append(found)
        else:
            reasons[candidate.id] = found
    rows = _confirm(package, parted, runner)
    verdicts = []
    for candidate in candidates:
        row = rows.get(candidate.id, reasons.get(candidate.id, ""))
        if isinstance(row, str):
            verdicts.append(Verdict(candidate, row))
        else:
            fails = (*row["hidden"]["fail_to_pass"], *row["visible"]["fail_to_pass"])
            verdicts.append(Verdict(candidate, "", row, fails))
    return verdicts


def _tests(candidate: Candidate) -> tuple[TestFunction, ...]:
    """The tests that run what the candidate changes, the most specific first."""
    found: dict[TestFunction, None] = {}
    for function in candidate.functions:
        seconds = 0.0
        for test in function.tests[: _MOST_TESTS // len(candidate.functions)]:
            seconds += test.seconds
            if found and seconds > _MOST_S:
                continue
            found[test] = None
    return tuple(found)


def _job(
    package: Package,
    name: str,
    candidate: Candidate,
    tests: Sequence[TestFunction],
    when: str,
) -> SuiteRun:
    """Runs some tests on the package, as it is before or after it was mended."""
    files = test_files(package, tests)
    sources = broken(package.sources, candidate.changes) if when == "before" else {}
    explained = name.endswith(f"{_SIDES[1]} before")
    return SuiteRun(name, {**sources, **files}, tuple(files), explained=explained)


def _part(
    package: Package,
    candidate: Candidate,
    outcome: Outcome,
    known: Mapping[tuple, frozenset[str]],
) -> _Parted | str:
    """The candidate with its tests parted, or why it is no task."""
    if outcome.ending:
        return HANGS if outcome.ending == "timeout" else DIES
    if (
        outcome.errors or not outcome.tests
    ):  # no test at all: what configures them cannot be imported
        return NO_IMPORT
    tests = _tests(candidate)
    passed = outcome.passed()
    failing = [test for test in tests if not set(test.ids) <= passed]
    if not failing:
        return UNNOTICED
    if len(failing) == 1 and not candidate.deletes:
        return ALONE
    changes = candidate.changes if len(candidate.changes) > 1 else ()
    parts = [known[change.path, change.line, change.new] for change in changes]
    order = list(failing)
    random.Random(candidate.id).shuffle(order)
    count = 0 if len(failing) == 1 else 2 if len(failing) >= _MANY else 1
    for first in range(max(1, len(order))):
        visible = (order[first:] + order[:first])[:count]
        hidden = [test for test in tests if test not in visible]
        hidden = [test for test in hidden if not _alike(package, test, visible)]
        noticing = {name for test in hidden if test in failing for name in test.ids}
        parts = [
            known[change.path, change.line, change.new]
            for change in candidate.changes
            if len(candidate.changes) > 1
        ]
        if noticing and all(noticing & part for part in parts):
            return _Parted(candidate, tuple(hidden), tuple(visible), passed)
        if noticing and parts:
            return ONE_SIDED
    return SHARED


def _alike(package: Package, test: TestFunction, others: Sequence[TestFunction]) -> bool:
    """True if a test function does the same as another one, or uses the same table."""
    own = testfiles.bodies(package.tests[test.path]).get(test.line)
    for other in others:
        text = package.tests[other.path]
        if testfiles.bodies(text).get(other.line) == own:
            return True
        lines = (frozenset({test.line}), frozenset({other.line}))
        if test.path == other.path and testfiles.shared_tables(text, *lines):
            return True
    return False


def _confirm(
    package: Package, parted: Sequence[_Parted], runner: Runner
) -> dict[str, dict[str, Any] | str]:
    """Row of each candidate, or the reason why it is no task, by the candidate's id."""
    rounds: list[dict[str, Outcome]] = []
    for number, sides in enumerate((_SIDES, (_BOTH,)), start=1):
        jobs = [
            _job(package, _name(one, side, when), one.candidate, one.side(side), when)
            for one in parted
            for side in sides
            for when in _WHEN
            if one.side(side)
        ]
        # another order, so that what one job leaves behind would make runs differ
        random.Random(number).shuffle(jobs)
        rounds.append(runner.run(package.world, jobs, hash_seed=number) if jobs else {})
    apart, together = rounds
    return {one.candidate.id: _row(package, one, apart, together) for one in parted}


def _name(one: _Parted, side: str, when: str) -> str:
    return f"{one.candidate.id} {side} {when}"


def _row(
    package: Package,
    one: _Parted,
    apart: Mapping[str, Outcome],
    together: Mapping[str, Outcome],
) -> dict[str, Any] | str:
    """The task as JSON, or why it is none. apart: runs of hidden and visible tests alone."""
    sides: dict[str, dict[str, Any]] = {}
    both = {when: together[_name(one, _BOTH, when)] for when in _WHEN}
    said: Mapping[str, str] = {}
    for side in _SIDES:
        sides[side] = {"files": {}, "fail_to_pass": [], "pass_to_pass": []}
        if not one.side(side):
            continue
        wanted = {name for test in one.side(side) for name in test.ids}
        before, after = (apart[_name(one, side, when)] for when in _WHEN)
        # Classes may inherit further tests, which are not of the task.
        runs = (after, both["after"])
        if any(run.ending or run.errors or wanted - run.passed() for run in runs):
            return NOT_SOLVED
        passed = [
            found & wanted for found in (one.passed, before.passed(), both["before"].passed())
        ]
        if "timeout" in (before.ending, both["before"].ending):
            return HANGS
        if any(found != passed[0] for found in passed) or passed[0] == wanted:
            return UNSTABLE
        sides[side] = {
            "files": test_files(package, one.side(side)),
            "fail_to_pass": sorted(wanted - passed[0]),
            "pass_to_pass": sorted(passed[0]),
        }
        said = before.said
    candidate, pin = one.candidate, package.pin
    if candidate.deletes:
        text = words.deletion(pin, candidate, _tests(candidate), one.visible)
    else:
        failing = sides["visible"]["fail_to_pass"]
        text = words.bug(pin, candidate, {name: said.get(name, "") for name in failing})
    return {
        "id": f"{pin.label}/{candidate.id}",
        "package": pin.name,
        "version": pin.version,
        "kind": candidate.kind,
        "operators": list(candidate.operators),
        "functions": [function.key for function in candidate.functions],
        "message": text,
        "world": dataclasses.asdict(package.world),
        "changes": [change.row() for change in candidate.changes],
        **sides,
    }


def _copied(package: Package, candidate: Candidate) -> bool:
    """True if the changed lines stand in another file of the world too or, for a deletion,
    elsewhere in their own file.
    """
    changed = broken(package.sources, candidate.changes)
    world = {**package.texts, **changed}
    for change in candidate.changes:
        if candidate.deletes:
            sought = _code(change.old[1:])
            searched = world
        else:
            lines = split_lines(package.sources[change.path], keepends=True)
            begin = max(0, change.line - 1 - _CONTEXT)
            sought = _code(lines[begin : change.line - 1 + len(change.old) + _CONTEXT])
            searched = {path: text for path, text in world.items() if path != change.path}
        if any(f"\n{sought}\n" in f"\n{_code_of(text)}\n" for text in searched.values()):
            return True
    return False


def _code(lines: Iterable[str]) -> str:
    """Lines without what does not matter: indentation, blank lines and comments."""
    stripped = (line.strip() for line in lines)
    return "\n".join(line for line in stripped if line and not line.startswith("#"))


@functools.lru_cache(2048)
def _code_of(text: str) -> str:
    return _code(split_lines(text))
