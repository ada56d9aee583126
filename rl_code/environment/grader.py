"""Grades a snapshot by its tests, in fresh sandboxes, trusting nothing that the candidate's process
says of itself.

Cases: the process gets arguments, and what it returns is compared out here. Code: the tests run in
a sandbox of their own, in which the entry point is a proxy for the candidate's process. Neither way
does an expected value reach a process that has imported the candidate's file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from rl_code.environment.compare import accepts
from rl_code.environment.sandbox.pool import Caller, CallResult, Sandbox, SandboxPool
from rl_code.types import Case, Tests

_SHOWN = 200


@dataclasses.dataclass(frozen=True)
class Grade:
    """What the tests came to.

    passed, errors: one each per test, cases first, then code. An error is "" where the test passed
    and quotes expected values where not: for the agent's eyes only if it may see the test. flags:
    causes of failures other than a wrong value or an exception: "exited", "killed", "timeout" (see
    CallResult). seconds: wall-clock.
    """

    passed: tuple[bool, ...]
    errors: tuple[str, ...]
    flags: tuple[str, ...]
    seconds: float


def grade(
    path: str,
    entry_point: str,
    tests: Tests,
    snapshot: Mapping[str, str],
    pool: SandboxPool,
    timeout_s: float,
) -> Grade:
    """Runs ``tests`` on ``entry_point`` of the file at ``path``.

    timeout_s: for all cases together, and again for all statements together.

    Raises:
      ValueError: a test whose arguments the wire does not carry.
      SandboxFault: the sandbox failed; the candidate is not to blame.
    """
    start = time.monotonic()
    errors: list[str] = []
    causes: set[str] = set()
    try:
        sandbox = pool.open(snapshot)
    except ValueError as error:  # files made to fit no other workspace
        errors = [str(error)] * len(tests)
    else:
        with sandbox:
            errors += _call(path, entry_point, tests.cases, sandbox, timeout_s, causes)
            errors += _check(path, entry_point, tests.code, sandbox, pool, timeout_s, causes)
    flags = tuple(sorted(causes & {"exited", "killed", "timeout"}))
    return Grade(
        tuple(not error for error in errors), tuple(errors), flags, time.monotonic() - start
    )


def _call(
    path: str,
    entry_point: str,
    cases: tuple[Case, ...],
    sandbox: Sandbox,
    timeout_s: float,
    causes: set[str],
) -> list[str]:
    """One error per case, "" when it passed; adds the causes of failed calls to ``causes``."""
    if not cases:
        return []
    results = sandbox.call(path, entry_point, [case.args for case in cases], timeout_s=timeout_s)
    causes |= {one.cause for one in results}
    return [_case_error(entry_point, case, one) for case, one in zip(cases, results, strict=True)]


def _case_error(entry_point: str, case: Case, result: CallResult) -> str:
    """Why a case failed; "" when it passed."""
    if result.ok and accepts(case, result.value):
        return ""
    call = f"{entry_point}({', '.join(map(repr, case.args))})"
    if not result.ok:
        return f"{_cut(call)}: {result.error}"
    return f"{_cut(call)} returned {_cut(repr(result.value))}, expected {_cut(repr(case.expected))}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _check(
    path: str,
    entry_point: str,
    statements: tuple[str, ...],
    sandbox: Sandbox,
    pool: SandboxPool,
    timeout_s: float,
    causes: set[str],
) -> list[str]:
    """One error per statement, "" when it passed; adds the causes of failed calls to ``causes``."""
    if not statements:
        return []
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        checker = stack.enter_context(pool.open({}))
        caller: Caller | None = None

        def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallResult:
            nonlocal caller
            if caller is None or caller.ended:
                left = max(deadline - time.monotonic(), 0.0)
                caller = stack.enter_context(
                    sandbox.caller(path, entry_point, left, said_s=timeout_s)
                )
            result = caller.call(args, kwargs)
            causes.add(result.cause)
            return result

        return checker.check(entry_point, statements, answer, timeout_s=timeout_s)
