"""Grades a snapshot by its tests, in fresh sandboxes. Nothing that the candidate's process says of
itself is trusted.

There are two kinds of tests. For cases, the candidate's process gets the arguments of one call at a
time, and the judge, a process on the host, compares what it returns. Tests written as code run in a
sandbox of their own, in which the entry point is a proxy for the candidate's process. In both
kinds, no expected value reaches a process that has imported the candidate's file, and the training
process never decodes what a candidate sends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Sequence

from absl import logging

from rl_code.environment.sandbox.pool import (
    CallResult,
    Question,
    Sandbox,
    SandboxFault,
    SandboxPool,
)
from rl_code.environment.sandbox.snapshot import Snapshot
from rl_code.types import Case, Tests, World

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
) -> Grade:
    """Runs ``tests`` on ``entry_point`` of the file at ``path``.

    timeout_s: seconds for all cases together, and as many again for all statements. A test that
    times out without having used its CPU time is run once more, so that honest work does not fail
    because the machine was busy. world: of the task; the snapshot is then the difference from it.

    Raises:
      ValueError: a test whose arguments the wire does not carry.
      SandboxFault: the sandbox failed; the candidate is not to blame.
    """
    start = time.monotonic()
    try:
        marks, lost = _marks(path, entry_point, tests, snapshot, pool, timeout_s, world)
    except SandboxFault as fault:
        logging.warning("a sandbox failed while work was graded: %s", fault)
        lost = True
    if lost:
        # By the machine's doing or the candidate's, nobody knows. Code that brings its sandbox down
        # does so again.
        marks, _ = _marks(path, entry_point, tests, snapshot, pool, timeout_s, world)
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
) -> tuple[list[_Mark], bool]:
    """The outcome of each test, and whether a sandbox was lost meanwhile."""
    try:
        sandbox = pool.open(snapshot, world)
    except ValueError as error:  # files made to fit no other workspace
        return [_Mark(str(error))] * len(tests), False
    with sandbox, contextlib.ExitStack() as stack:
        grading = _Grading(path, entry_point, snapshot, sandbox, pool, timeout_s, stack)
        marks = grading.cases(tests.cases) + grading.statements(tests.code)
        return marks, grading.lost


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
        if self._checker is None:
            self._checker = self.stack.enter_context(self.pool.open({}))
        checked = self._checker.check(
            self.entry_point,
            statements,
            lambda left: self.sandbox.caller(self.path, self.entry_point, left, self.timeout_s),
            timeout_s=self.timeout_s,
        )
        marks = [
            _Mark(one.error, one.flags | (one.causes & _CAUSES), bool(one.error) and one.starved)
            for one in checked
        ]
        return self._regraded(marks, lambda late: self.statements([statements[i] for i in late]))

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
    key = repr((file, [(case.args, case.expected) for case in cases]))
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()
    return random.Random(digest).sample(range(len(cases)), len(cases))


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
