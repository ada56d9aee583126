"""Differential tests: hidden cases whose expected values the reference solution gives, run in the
sandbox.

A proposed input becomes a case only when

  - the reference answers it in time and with a plain value;
  - it gives the same answer in a module where sets are walked backwards, ties of ``max`` and
    ``min`` go the other way and random numbers are others, so that nothing depends on the order of
    a set, on the choice among equals, on changing a list while a loop walks it, on chance or on the
    clock;
  - it lies in the domain that the task's own asserts exercise (``domain``), where the task has any;
  - the references of similar tasks that pass this task's asserts give the same answer.

References that fail the task's own tests are found on the way. What was found is kept in a JSON
file and computed again only when the task or the settings change.
"""

from __future__ import annotations

import ast
import collections
import concurrent.futures
import dataclasses
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from rl_code.environment.compare import same
from rl_code.environment.grader import Grade, grade
from rl_code.environment.sandbox.pool import Sandbox, SandboxPool
from rl_code.tasks.cache import DIFFERENTIAL, Cache
from rl_code.tasks.domain import BRANCHES, expects, neighbours, traced
from rl_code.tasks.mutation import propose
from rl_code.tasks.perturb import perturb
from rl_code.types import Case, Task, Tests

REVISION = 5  # of this file and of the proposals; a cache written by another revision is not used
FLOAT_TOLERANCE = 1e-6
_LONGEST_VALUE = 4000  # characters of an expected value's repr
_HANGS = 2  # inputs of one task that may hang before the rest is given up
_PROPOSALS = 40  # inputs near those of the cases of a task
_ATTEMPTS = 2  # a call or test that times out on a busy machine gets another chance

Propose = Callable[[Task], Sequence[tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class DifferentialConfig:
    """Settings for hidden cases that are added to tasks: their number and their computation."""

    # The most cases that are added to a task; 0 adds every one that was found.
    cases: int
    # Wall-clock seconds of one batch of calls, as when a solution is graded. The reference must
    # pass the task's own tests within this time, and the added cases within half of it.
    timeout_s: float
    # Tasks that are worked on at once.
    workers: int


@dataclasses.dataclass(frozen=True)
class Strengthened:
    """Tasks with differential tests, and what was left out."""

    # The tasks whose reference passes the task's own tests. Cases are added to the hidden ones.
    tasks: tuple[Task, ...]
    # For each task that is left out: id -> why its reference failed.
    failed: Mapping[str, str]
    # Id -> number of cases that were added.
    added: Mapping[str, int]
    # Reason -> number of inputs that became no case, although the reference answers them, and gives
    # the same answer twice.
    dropped: Mapping[str, int]

    def summary(self) -> str:
        """Counts of the cases that remain and that were left out, in one line."""
        counts = sorted(self.added.values())
        total = sum(counts)
        spread = f", {counts[0]} to {counts[-1]} a task" if counts else ""
        none = counts.count(0)
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        failed = ", ".join(self.failed) or "-"
        return (
            f"{len(self.tasks)} tasks, {total} differential tests{spread}, none for {none} tasks; "
            f"left out: {dropped}; references of {len(self.failed)} tasks fail: {failed}"
        )


def strengthen(
    tasks: Sequence[Task],
    propose: Propose,
    config: DifferentialConfig,
    pool: SandboxPool,
    cache: Path,
    others: Sequence[Task] = (),
) -> Strengthened:
    """Adds differential cases to the hidden tests of every task, and leaves out tasks whose
    reference fails.

    A task's ``meta["tolerance"]`` says how far the numbers of its cases may be apart: 0 if it is
    absent. Floats always have a tolerance of at least FLOAT_TOLERANCE.

    Args:
      propose: gives the argument tuples to try for a task, small ones first.
      cache: a JSON file, which is made or extended.
      others: tasks whose references may solve one of ``tasks`` as well (``domain.neighbours``).

    Raises SandboxFault when the sandbox itself fails.
    """
    proposals = {
        task.id: [arguments for arguments in propose(task) if _literal(arguments)] for task in tasks
    }
    near = {task.id: neighbours(task, others) for task in tasks}
    keys = {task.id: _key(task, proposals[task.id], config, near[task.id]) for task in tasks}
    file = Cache(cache)
    known = {task.id: file.get(task.id) or {} for task in tasks}
    missing = [task for task in tasks if known[task.id].get("key") != keys[task.id]]
    if missing:
        with concurrent.futures.ThreadPoolExecutor(config.workers) as executor:
            found = executor.map(
                lambda task: _examine(task, proposals[task.id], config, pool, near[task.id]),
                missing,
            )
            new = {
                task.id: {"key": keys[task.id], **entry}
                for task, entry in zip(missing, found, strict=True)
            }
        known |= new
        file.put(new)
    kept = []
    failed = {}
    added = {}
    dropped: collections.Counter[str] = collections.Counter()
    for task in tasks:
        entry = known[task.id]
        dropped.update(entry["dropped"])
        if entry["failure"]:
            failed[task.id] = entry["failure"]
            continue
        cases = tuple(
            Case(ast.literal_eval(arguments), ast.literal_eval(expected), tolerance)
            for arguments, expected, tolerance in entry["cases"]
        )
        hidden = Tests(cases=task.hidden_tests.cases + cases, code=task.hidden_tests.code)
        if not hidden:
            failed[task.id] = "no tests: the reference answers none of the inputs"
            continue
        added[task.id] = len(cases)
        kept.append(dataclasses.replace(task, hidden_tests=hidden))
    return Strengthened(tuple(kept), failed, added, dict(dropped))


def _examine(
    task: Task,
    proposals: Sequence[tuple[Any, ...]],
    config: DifferentialConfig,
    pool: SandboxPool,
    near: Sequence[Task],
) -> dict:
    """Examine one task, and return what the cache keeps of it: why its reference fails ("" if it
    does not), the cases as literals, and for each reason how many inputs were left out.
    """
    own = Tests(
        cases=task.visible_tests.cases + task.hidden_tests.cases,
        code=task.visible_tests.code + task.hidden_tests.code,
    )
    if own:
        marks = _grade(task, own, pool, config.timeout_s)
        if not all(marks.passed):
            i = marks.passed.index(False)
            return {
                "failure": f"test {i + 1} of {len(own)}: {marks.errors[i] or 'wrong value'}",
                "cases": [],
                "dropped": {},
            }
    cases = reference_cases(task, proposals, pool, config.timeout_s) if proposals else []
    answered = len(cases)
    cases = within_domain(task, cases, pool, config.timeout_s)
    inside = len(cases)
    for other in near:
        cases = _agreed(task, cases, other, own, pool, config.timeout_s)
    dropped = {"outside the asserts' domain": answered - inside, "disputed": inside - len(cases)}
    if config.cases:
        cases = choose(cases, config.cases)
    # with time to spare, so that a busy machine does not fail a solution that is as fast as the
    # reference
    if cases:
        marks = _grade(task, Tests(cases=tuple(cases)), pool, config.timeout_s / 2)
        cases = [case for case, passed in zip(cases, marks.passed, strict=True) if passed]
    return {
        "failure": "",
        "cases": [[repr(case.args), repr(case.expected), case.tolerance] for case in cases],
        "dropped": dropped,
    }


def within_domain(
    task: Task, cases: Sequence[Case], pool: SandboxPool, timeout_s: float
) -> list[Case]:
    """The cases that lie in the domain of the task's own value-level tests; all of them where it
    has no such tests.
    """
    own = task.visible_tests.cases + task.hidden_tests.cases
    if not own or not cases:
        return list(cases)
    expected = [case.expected for case in own]
    kept = [case for case in cases if expects(expected, case.expected)]
    module = traced(task.reference[task.path], task.entry_point)
    calls = [case.args for case in (*own, *kept)]
    with pool.open({**task.reference, task.path: module}) as sandbox:
        results = sandbox.call(task.path, BRANCHES, calls, timeout_s=timeout_s)
    taken = [set(result.value) if result.ok else None for result in results]
    if None in taken[: len(own)]:  # not to be watched: what the answers show has to do
        return kept
    known = set().union(*taken[: len(own)])
    branches = taken[len(own) :]
    return [
        case
        for case, found in zip(kept, branches, strict=True)
        if found is not None and found <= known
    ]


def _agreed(
    task: Task,
    cases: list[Case],
    other: Task,
    own: Tests,
    pool: SandboxPool,
    timeout_s: float,
) -> list[Case]:
    """The cases on which another task's reference agrees; all, if it does not solve this task."""
    if not cases or not own:
        return cases
    marks = grade(other.path, other.entry_point, own, other.reference, pool, timeout_s)
    if not all(marks.passed):
        return cases
    tests = Tests(cases=tuple(cases))
    marks = grade(other.path, other.entry_point, tests, other.reference, pool, timeout_s)
    return [case for case, passed in zip(cases, marks.passed, strict=True) if passed]


def reference_cases(
    task: Task, proposals: Sequence[tuple[Any, ...]], pool: SandboxPool, timeout_s: float
) -> list[Case]:
    """A case for each proposal that the reference answers in time, twice alike, with a plain value
    of modest size.
    """
    try:
        other = {**task.reference, task.path: perturb(task.reference[task.path])}
    except SyntaxError:
        return []
    with pool.open(task.reference) as sandbox:
        first = _answers(sandbox, task, proposals, timeout_s)
    again = [arguments for arguments, _ in first]
    if not again:
        return []
    with pool.open(other) as sandbox:
        second = {
            repr(arguments): value for arguments, value in _answers(sandbox, task, again, timeout_s)
        }
    missing = object()
    tolerance = task.meta.get("tolerance", 0.0)
    return [
        Case(arguments, value, max(tolerance, FLOAT_TOLERANCE) if _has_float(value) else tolerance)
        for arguments, value in first
        if same(value, second.get(repr(arguments), missing))
        and _literal(value)
        and len(repr(value)) <= _LONGEST_VALUE
    ]


def _answers(
    sandbox: Sandbox, task: Task, proposals: Sequence[tuple[Any, ...]], timeout_s: float
) -> list[tuple[tuple[Any, ...], Any]]:
    """Arguments and value of every call that returned. A call that hangs is tried again, then its
    batch goes on.
    """
    answered: list[tuple[tuple[Any, ...], Any]] = []
    left = list(proposals)
    attempts = 0
    skipped = 0
    while left and skipped < _HANGS:
        results = sandbox.call(task.path, task.entry_point, left, timeout_s=timeout_s)
        hung = next((i for i, result in enumerate(results) if result.cause == "timeout"), len(left))
        answered += [
            (args, result.value)
            for args, result in zip(left[:hung], results[:hung], strict=True)
            if result.ok
        ]
        left = left[hung:]
        attempts = 1 if hung else attempts + 1
        if left and attempts == _ATTEMPTS:
            left = left[1:]
            attempts = 0
            skipped = skipped + 1
    return answered


def _grade(task: Task, tests: Tests, pool: SandboxPool, timeout_s: float) -> Grade:
    """The reference's grade; what times out is tried again, since a busy machine may be to
    blame.
    """
    for _ in range(_ATTEMPTS):
        marks = grade(task.path, task.entry_point, tests, task.reference, pool, timeout_s)
        if "timeout" not in marks.flags:
            break
    return marks


def choose(cases: Sequence[Case], count: int) -> list[Case]:
    """Up to ``count`` cases, taken in turn from those with each expected value, rarest value
    first.
    """
    by_value: dict[str, list[Case]] = collections.defaultdict(list)
    for case in cases:
        by_value[repr(case.expected)].append(case)
    queues = sorted(by_value.values(), key=len)
    chosen: list[Case] = []
    depth = 0
    while len(chosen) < min(count, len(cases)):
        chosen += [queue[depth] for queue in queues if len(queue) > depth]
        depth += 1
    return chosen[:count]


def _has_float(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return any(map(_has_float, value))
    if isinstance(value, dict):
        return any(map(_has_float, value.values()))
    return isinstance(value, float | complex)


def _literal(value: Any) -> bool:
    """True if the value's repr reads back as the very same value."""
    try:
        return same(ast.literal_eval(repr(value)), value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _key(
    task: Task,
    proposals: Sequence[tuple[Any, ...]],
    config: DifferentialConfig,
    near: Sequence[Task],
) -> str:
    """Digest of all that the entry depends on."""
    parts = (
        REVISION,
        sorted(task.reference.items()),
        task.path,
        task.entry_point,
        task.visible_tests,
        task.hidden_tests,
        task.meta.get("tolerance", 0.0),
        list(proposals),
        (config.cases, config.timeout_s),
        [(other.entry_point, sorted(other.reference.items())) for other in near],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def strengthened(
    tasks: Sequence[Task],
    inputs: Callable[[Task], Sequence[tuple]],
    config: DifferentialConfig | None,
    pool: SandboxPool | None,
    workdir: Path | None,
    name: str,
    others: Sequence[Task] = (),
) -> Sequence[Task]:
    """The tasks with differential tests on ``inputs``; as they are without a config.

    others: tasks whose references may solve one of ``tasks`` as well.
    """
    if config is None:
        return tasks
    if pool is None or workdir is None:
        raise ValueError(f"tasks of {name} with differential tests need a sandbox and a workdir")
    result = strengthen(tasks, inputs, config, pool, workdir / DIFFERENTIAL, others)
    logging.info("%s: %s", name, result.summary())
    return result.tasks


def mutations(task: Task) -> list[tuple]:
    """Inputs near those of the task's own cases, the same for the same task."""
    known = [case.args for case in task.visible_tests.cases + task.hidden_tests.cases]
    return propose(known, _PROPOSALS, random.Random(task.id))
