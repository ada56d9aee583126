"""Grades a snapshot by its tests, in fresh sandboxes. Nothing that the candidate's process says of
itself is trusted.

There are two kinds of tests. For cases, the candidate's process gets the arguments of one call at a
time, and the judge, a process on the host, compares what it returns. Tests written as code run in a
sandbox of their own, in which the entry point is a proxy for the candidate's process. In both
kinds, no expected value reaches a process that has imported the candidate's file, and the training
process never decodes what a candidate sends. A statement that passed is asked once more for another
value (``suites.statements``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Sequence

from absl import logging

from rl_code.environment.sandbox.pool import (
    CallResult,
    Checked,
    Question,
    Sandbox,
    SandboxFault,
    SandboxPool,
)
from rl_code.environment.sandbox.snapshot import Snapshot
from rl_code.environment.suites.again import CANARY_PASSED
from rl_code.environment.suites.statements import canary_of
from rl_code.types import Case, Tests, World

_CONTRADICTED = "passed, and so did a copy of it that asks for another value"
_SHOWN = 200
_CAUSES = {"exited", "killed", "timeout"}


@dataclasses.dataclass(frozen=True)
class Grade:
    """Result of the split grader, test by test."""

    # One for each test: first the cases, then the code.
    passed: tuple[bool, ...]
    # One for each test: "" if it passed. Other texts quote expected values, so the agent may read
    # them only for tests that it may see.
    errors: tuple[str, ...]
    # Observations, each name once, sorted:
    #   "exited", "killed", "timeout"  a call ended the process (see CallResult)
    #   "forged_result"  what came over the channel was no answer to the call
    #   "lying_value"  a returned value says that it equals what it does not
    #   "costly_value"  a returned value took too much time or memory to decode
    #   "swallowed_exception"  a test completed only because it lost an exception by accident
    #   "any_exception"  a test passed that takes whatever exception comes
    #   "canary_passed"  a statement passed, and so did a copy of it that asks for another value
    flags: tuple[str, ...]
    # Wall-clock.
    seconds: float


def grade(
    path: str,
    entry_point: str,
    tests: Tests,
    snapshot: Snapshot,
    pool: SandboxPool,
    timeout_s: float,
    world: World | None = None,
    canaries: int = 0,
) -> Grade:
    """Runs ``tests`` on ``entry_point`` of the file at ``path``.

    timeout_s: seconds for all cases together, and as many again for all statements. A test that
    times out without having used its CPU time is run once more, so that honest work does not fail
    because the machine was busy. world: of the task; the snapshot is then the difference from it.
    canaries: how many statements have canaries, for which there is what time the statements leave.

    Raises:
      ValueError: a test whose arguments the wire does not carry.
      SandboxFault: the sandbox failed; the candidate is not to blame.
    """
    start = time.monotonic()
    run = functools.partial(
        _marks, path, entry_point, tests, snapshot, pool, timeout_s, world, canaries
    )
    try:
        marks, lost = run()
    except SandboxFault as fault:
        logging.warning("a sandbox failed while work was graded: %s", fault)
        lost = True
    if lost:
        # By the machine's doing or the candidate's, nobody knows. Code that brings its sandbox down
        # does so again.
        marks, _ = run()
    return Grade(
        tuple(not mark.error for mark in marks),
        tuple(mark.error for mark in marks),
        tuple(sorted({flag for mark in marks for flag in mark.flags})),
        time.monotonic() - start,
    )


def _marks(
    path: str,
    entry_point: str,
    tests: Tests,
    snapshot: Snapshot,
    pool: SandboxPool,
    timeout_s: float,
    world: World | None,
    canaries: int,
) -> tuple[list[_Mark], bool]:
    """The outcome of each test, and whether a sandbox was lost meanwhile."""
    try:
        sandbox = pool.open(snapshot, world)
    except ValueError as error:  # files made to fit no other workspace
        return [_Mark(str(error))] * len(tests), False
    with sandbox, contextlib.ExitStack() as stack:
        grading = _Grading(path, entry_point, snapshot, sandbox, pool, timeout_s, stack)
        cases = grading.cases(tests.cases)
        until = time.monotonic() + timeout_s
        code = grading.statements(tests.code)
        if canaries:
            code = grading.contradicted(tests.code, code, canaries, until)
        return cases + code, grading.lost


@dataclasses.dataclass(frozen=True)
class _Mark:
    """One test's outcome. starved: it timed out, or was not run, for want of CPU time."""

    error: str
    flags: frozenset[str] = frozenset()
    starved: bool = False


@dataclasses.dataclass
class _Grading:
    """One grading. It holds the candidate's sandbox, and that of the checker if one is needed. It
    remembers whether tests that got too little CPU time may still be run once more.
    """

    path: str
    entry_point: str
    snapshot: Snapshot
    sandbox: Sandbox
    pool: SandboxPool
    timeout_s: float
    stack: contextlib.ExitStack
    _checker: Sandbox | None = None
    _again: bool = True

    @property
    def lost(self) -> bool:
        """True if one of its sandboxes is gone."""
        return self.sandbox.lost or (self._checker is not None and self._checker.lost)

    def cases(self, cases: Sequence[Case]) -> list[_Mark]:
        """One mark per case. They run in an order that the candidate cannot foresee."""
        if not cases:
            return []
        order = _order(cases, self.snapshot.get(self.path))
        results = run_cases(
            self.sandbox, self.path, self.entry_point, [cases[i] for i in order], self.timeout_s
        )
        marks = [
            _case_mark(self.entry_point, cases[i], result)
            for i, result in zip(order, results, strict=True)
        ]
        marks = self._regraded(marks, lambda late: self.cases([cases[order[i]] for i in late]))
        return [mark for _, mark in sorted(zip(order, marks, strict=True), key=lambda x: x[0])]

    def statements(self, statements: Sequence[str]) -> list[_Mark]:
        """One mark per statement."""
        if not statements:
            return []
        marks = [
            _Mark(one.error, one.flags | (one.causes & _CAUSES), bool(one.error) and one.starved)
            for one in self._check(statements, self.timeout_s)
        ]
        return self._regraded(marks, lambda late: self.statements([statements[i] for i in late]))

    def contradicted(
        self, statements: Sequence[str], marks: list[_Mark], most: int, until: float
    ) -> list[_Mark]:
        """The marks, in which a statement has failed that passes whatever value it asks for.

        The canaries of those that passed run in one new process of the candidate's. Where one
        passes, it runs again by itself, and so does its statement: code that remembers earlier
        calls passes one of them at most. most: canaries, drawn among more statements. until: the
        time (of time.monotonic) at which no more is begun.
        """
        rng = _drawn(self.snapshot.get(self.path), statements)
        good = [i for i, mark in enumerate(marks) if not mark.error]
        chosen = sorted(rng.sample(good, min(most, len(good))))
        drawn = {i: canary_of(statements[i], rng) for i in chosen}
        canaries = {i: canary for i, canary in drawn.items() if canary is not None}
        passed = self._passed(list(canaries.values()), until)
        for (i, canary), both in zip(canaries.items(), passed, strict=True):
            if both and all(
                self._passed([one], until) == [True] for one in (canary, statements[i])
            ):
                marks[i] = _Mark(_CONTRADICTED, marks[i].flags | {CANARY_PASSED})
        return marks

    def _passed(self, statements: Sequence[str], until: float) -> list[bool]:
        """True for each statement that passes in a new process of the candidate's."""
        left_s = until - time.monotonic()
        if not statements or left_s <= 0:
            return [False] * len(statements)
        return [not one.error for one in self._check(statements, left_s)]

    def _check(self, statements: Sequence[str], timeout_s: float) -> list[Checked]:
        """The statements run in the checker, with a new process of the candidate's."""
        if self._checker is None:
            self._checker = self.stack.enter_context(self.pool.open({}))
        return self._checker.check(
            self.entry_point,
            statements,
            lambda left: self.sandbox.caller(self.path, self.entry_point, left, timeout_s),
            timeout_s=timeout_s,
        )

    def _regraded(self, marks: list[_Mark], run: Callable[[list[int]], list[_Mark]]) -> list[_Mark]:
        """The marks. Those of tests that got too little CPU time are replaced by what ``run`` gives
        for their indices, once in a grading.
        """
        late = [i for i, mark in enumerate(marks) if mark.starved]
        if not late or not self._again:
            return marks
        self._again = False
        for i, mark in zip(late, run(late), strict=True):
            marks[i] = mark
        return marks


def run_cases(
    sandbox: Sandbox, path: str, entry_point: str, cases: Iterable[Case], timeout_s: float
) -> list[CallResult]:
    """Calls the entry point for every case, in order; ``passed`` of a result says how it went.

    Raises ValueError, SandboxFault as ``grade``.
    """
    questions = [Question(case.args, case=case) for case in cases]
    return sandbox.ask(path, entry_point, questions, timeout_s)


def _order(cases: Sequence[Case], file: object) -> list[int]:
    """A permutation drawn anew for every text of the graded file. It depends on the expected
    values, which the candidate does not know, and is the same when the same work is graded again.
    """
    asked = [(case.args, case.expected) for case in cases]
    return _drawn(file, asked).sample(range(len(cases)), len(cases))


def _drawn(file: object, asked: Sequence[object]) -> random.Random:
    """Random numbers of a file and of what its tests ask for, which the candidate does not know."""
    key = repr((file, list(asked)))
    return random.Random(hashlib.sha256(key.encode(errors="surrogatepass")).digest())


def _case_mark(entry_point: str, case: Case, result: CallResult) -> _Mark:
    flags = frozenset(result.flags) | ({result.cause} & _CAUSES)
    if result.passed:
        return _Mark("", flags)
    call = _cut(f"{entry_point}({', '.join(map(repr, case.args))})")
    if result.ok:
        return _Mark(
            f"{call} returned {_cut(result.shown)}, expected {_cut(repr(case.expected))}", flags
        )
    return _Mark(f"{call}: {result.error}", flags, result.starved)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
