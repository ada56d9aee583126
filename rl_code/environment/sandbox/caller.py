"""Calls into processes that are not trusted, seen from the host.

The host opens the channels and says how long a process may live; it never reads what a candidate
sends. Values go straight from the candidate's process to a trusted and disposable one, which
decodes and compares them: the judge (judge.py) for cases, the checker (inside/checker.py) for tests
written as code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from rl_code.environment.sandbox.connection import GRACE_S, Connection
from rl_code.environment.sandbox.errors import CandidateLost
from rl_code.environment.sandbox.inside import checker, wire
from rl_code.environment.sandbox.judge_pool import Judges, Question, Verdict

# Exit codes, and what the signals of limits mean.
KILLED = 128 + signal.SIGKILL
_SIGNALS = {
    KILLED: "killed (out of memory?)",
    128 + signal.SIGXCPU: "killed: its CPU time is used up",
    128 + signal.SIGSEGV: "crashed (SIGSEGV)",
    128 + signal.SIGABRT: "crashed (SIGABRT)",
    128 + signal.SIGSYS: "killed by the system call filter",
}
_BROUGHT_DOWN = {"status": KILLED, "timed_out": False}
_NOT_RUN = "not run: an earlier call used up the time"


@dataclasses.dataclass(frozen=True)
class CallResult:
    """Result of one call."""

    # The returned value, made of exact types. None when there was a case to compare it with.
    value: Any
    # Reason why there is no value, on one line; "" when ok.
    error: str
    ok: bool
    # "" when ok, else "raised", "exited" (sys.exit, os._exit), "killed" (a crash or a limit),
    # "timeout", "not_run" (an earlier call used up the time).
    cause: str = ""
    # True if the value is the one that the case expects; False without a case.
    passed: bool = False
    # The beginning of the value's repr when it is not what the case expects.
    shown: str = ""
    # Observations of the judge: "forged_result", "lying_value", "costly_value".
    flags: tuple[str, ...] = ()
    # Timed out although the process had used little CPU time: the machine may have been busy.
    starved: bool = False


@dataclasses.dataclass(frozen=True)
class Checked:
    """Result of one statement of a test. error: "" when it passed. causes: of failed calls, as in
    CallResult. flags: see inside/checker.py.
    """

    error: str
    causes: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    starved: bool = False


class Child:
    """A fork of the session that talks over a socket of its own. Nothing it says is trusted.

    The attribute ``channel`` is the host's end of the socket. The process ends when it is done,
    when ``timeout_s`` seconds have passed, or when this object is closed.
    """

    def __init__(self, connection: Connection, request: dict[str, Any], timeout_s: float):
        self._connection = connection
        self._timeout_s = timeout_s
        self.channel, remote = socket.socketpair()
        self._ending: dict[str, Any] | None = None
        with remote:
            try:
                connection.send(
                    {**request, "timeout": timeout_s}, [remote.fileno()], of_candidate=True
                )
                connection.busy = True
            except CandidateLost:
                self._ending = _BROUGHT_DOWN
            except BaseException:
                self.channel.close()
                raise

    def ending(self, said_s: float) -> tuple[str, str]:
        """Ends the process, if it has not ended; why it ended, in words and as the cause of a
        CallResult. said_s: the time limit to name.
        """
        ended = self._wait()
        code = ended["status"]
        if ended["timed_out"]:
            return f"timed out after {said_s:.1f} s", "timeout"
        if code in _SIGNALS:
            return _SIGNALS[code], "killed"
        return f"the process exited with code {code} before it returned", "exited"

    def idle(self) -> bool:
        """Ends the process, if it has not ended; whether it used less than half of its time as CPU
        time. A process that timed out so may have waited for a busy machine.
        """
        return self._wait().get("cpu_s", self._timeout_s) < self._timeout_s / 2

    def _wait(self) -> dict[str, Any]:
        if self._ending is None:
            self._ending = _BROUGHT_DOWN
            self._connection.busy = False
            with contextlib.suppress(CandidateLost):
                self._connection.send({"op": "stop"})
                self._ending = self._connection.receive(GRACE_S, of_candidate=True)
        return self._ending

    def close(self) -> None:
        """Ends the process. May be called twice."""
        try:
            self._wait()
        finally:
            self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Program(Child):
    """A program that talks over the socket while it runs. Nothing it says is trusted.

    argv: what is executed in the workspace. number: the descriptor at which it finds its end of the
    socket. stdin: what it reads first.
    """

    def __init__(
        self,
        connection: Connection,
        argv: Sequence[str],
        number: int,
        timeout_s: float,
        stdin: str = "",
    ):
        request = {"op": "run", "argv": list(argv), "stdin": stdin, "channel": number}
        super().__init__(connection, request, timeout_s)

    @property
    def printed(self) -> str:
        """Standard output and error of the process, cut in the middle. Ends the process if it has
        not ended.
        """
        return self._wait().get("output", "")

    def ended(self) -> tuple[int, str]:
        """Exit code of the process, and what it printed. Ends the process if it has not ended."""
        said = self._wait()
        return said["status"], said.get("output", "")


class Caller(Child):
    """A process that has imported the candidate's file and answers calls until it or its time ends.

    judges: the processes that read its answers. said_s: the time limit that errors name. The
    attribute ``ended`` says that it answers no more calls.
    """

    def __init__(
        self,
        connection: Connection,
        judges: Judges,
        path: str,
        entry_point: str,
        timeout_s: float,
        said_s: float | None = None,
    ):
        self.ended = False
        self._judges = judges
        self._entry_point = entry_point
        self._said_s = timeout_s if said_s is None else said_s
        super().__init__(
            connection, {"op": "call", "path": path, "entry_point": entry_point}, timeout_s
        )

    def call(self, args: tuple, kwargs: dict[str, Any]) -> CallResult:
        """Calls the entry point. Raises ValueError for arguments that the wire does not carry."""
        return self.ask([Question(args, kwargs)])[0]

    def ask(self, questions: Sequence[Question]) -> list[CallResult]:
        """Asks one question after another, each sent when the one before is answered; stops after
        the one at which the process ended.

        Raises ValueError for arguments that the wire does not carry.
        """
        patience_s = self._timeout_s + GRACE_S
        verdicts = self._judges.ask(self.channel, questions, patience_s)
        return [self._result(verdict) for verdict in verdicts]

    def _result(self, verdict: Verdict) -> CallResult:
        flags = ("lying_value",) if verdict.lying else ()
        text = one_line(verdict.text)
        match verdict.kind:
            case "passed":
                return CallResult(None, "", True, passed=True, flags=flags)
            case "wrong":
                return CallResult(None, "", True, shown=verdict.text, flags=flags)
            case "value":
                return CallResult(wire.loads(verdict.text), "", True, flags=flags)
            case "raised":
                return CallResult(None, text, False, "raised", flags=flags)
            case "exited":
                return CallResult(None, text, False, "exited")
            case "refused":
                raise ValueError(f"{self._entry_point} cannot be called in the sandbox: {text}")
        self.ended = True
        error, cause = self.ending(self._said_s)
        if verdict.kind == "ended":
            starved = cause == "timeout" and self.idle()
            return CallResult(None, error, False, cause, starved=starved)
        flag = "forged_result" if verdict.kind == "forged" else "costly_value"
        return CallResult(
            None, f"the result cannot be read: {text}", False, "raised", flags=(flag,)
        )


def ask_all(
    connection: Connection,
    open_caller: Callable[[float], Caller],
    questions: Sequence[Question],
    timeout_s: float,
) -> list[CallResult]:
    """A result for every question. After one that ended the process the others go to a new one.

    connection: of the candidate's sandbox. open_caller: opens a process in it that may live for so
    many seconds. timeout_s: for all questions together.
    """
    deadline = time.monotonic() + timeout_s
    results: list[CallResult] = []
    while len(results) < len(questions):
        if results and (results[-1].cause == "timeout" or connection.loss):
            late = CallResult(None, _NOT_RUN, False, "not_run", starved=results[-1].starved)
            return results + [late] * (len(questions) - len(results))
        with open_caller(max(deadline - time.monotonic(), 0.0)) as caller:
            results += caller.ask(questions[len(results) :])
    return results


def check_all(
    connection: Connection,
    entry_point: str,
    statements: Sequence[str],
    open_caller: Callable[[float], Caller],
    timeout_s: float,
) -> list[Checked]:
    """Runs trusted tests in which ``entry_point`` is a proxy; how each of them ended.

    connection: of the checker's own sandbox. open_caller: opens a process of the candidate's, in
    another sandbox, that may live for so many seconds.
    """
    deadline = time.monotonic() + timeout_s
    request = {"op": "check", "entry_point": entry_point, "statements": list(statements)}
    marks: list[Checked] = []
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(Child(connection, request, timeout_s))
        child.channel.settimeout(timeout_s + GRACE_S)
        causes: set[str] = set()
        starved = False
        caller: Caller | None = None
        while len(marks) < len(statements):
            try:
                match wire.read_json(child.channel, checker.CONTROL_BYTES):
                    case {"need": True} if caller is None:
                        caller = open_caller(max(deadline - time.monotonic(), 0.0))
                        stack.callback(caller.close)
                        socket.send_fds(child.channel, [b"f"], [caller.channel.fileno()])
                    case {"gone": str(reason)} if caller is not None:
                        error, cause = caller.ending(timeout_s)
                        causes.add("raised" if reason else cause)
                        starved = starved or (cause == "timeout" and caller.idle())
                        caller.close()
                        caller = None
                        wire.write_frame(child.channel, error)
                    case {"done": str(error), "flags": list(flags)}:
                        marks.append(Checked(error, frozenset(causes), frozenset(flags), starved))
                        causes = set()
                        starved = False
                    case _:
                        break
            except (OSError, ValueError):  # WireError is a ValueError
                break
        if len(marks) < len(statements):
            error, cause = child.ending(timeout_s)
            idle = child.idle() and (caller is None or caller.idle())
            starved = cause == "timeout" and idle
            rest = Checked(error, frozenset({*causes, cause}), frozenset(), starved)
            marks += [rest] * (len(statements) - len(marks))
    return marks


def one_line(text: str) -> str:
    """The text on one line, without what is not Unicode."""
    return " ".join(text.encode(errors="replace").decode().split())
