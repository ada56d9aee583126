"""Calls into processes that are not trusted: a socket to a fork of the session, and what may come
back over it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
from collections.abc import Sequence
from typing import Any, Self

from rl_code.environment.sandbox.connection import GRACE_S, Connection
from rl_code.environment.sandbox.errors import CandidateLost
from rl_code.environment.sandbox.inside import candidate, wire

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


@dataclasses.dataclass(frozen=True)
class CallResult:
    """What one call came to. value: made of exact builtin types. error: one line, "" when ok.

    cause: "" when ok, else "raised", "exited" (sys.exit, os._exit), "killed" (a crash or a limit),
    "timeout", "not_run" (an earlier call used up the time).
    """

    value: Any
    error: str
    ok: bool
    cause: str = ""


class Child:
    """A fork of the session that talks over a socket of its own. Nothing it says is trusted."""

    def __init__(self, connection: Connection, request: dict[str, Any], timeout_s: float):
        self._connection = connection
        self._channel, remote = socket.socketpair()
        self._channel.settimeout(timeout_s + GRACE_S)
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
                self._channel.close()
                raise

    def send(self, text: str) -> None:
        """Sends a frame. Raises OSError when the process is gone."""
        wire.write_frame(self._channel, text)

    def receive(self) -> Any:
        """The value of the next frame; None when the process has ended. Raises OSError,
        WireError.
        """
        try:
            frame = wire.read_frame(self._channel, candidate.FRAME_BYTES)
        except ConnectionResetError:  # it ended without having read everything
            return None
        return None if frame is None else wire.loads(frame)

    def ending(self, said_s: float) -> tuple[str, str]:
        """Ends the process, if it has not; why it ended, in words and as the cause of a
        CallResult.
        """
        ended = self._wait()
        code = ended["status"]
        if ended["timed_out"]:
            return f"timed out after {said_s:.1f} s", "timeout"
        if code in _SIGNALS:
            return _SIGNALS[code], "killed"
        return f"the process exited with code {code} before it returned", "exited"

    def _wait(self) -> dict[str, Any]:
        if self._ending is None:
            self._ending = _BROUGHT_DOWN
            self._connection.busy = False
            with contextlib.suppress(CandidateLost):
                self._connection.send({"op": "stop"})
                self._ending = self._connection.receive(GRACE_S, of_candidate=True)
        return self._ending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._wait()
        finally:
            self._channel.close()


class Caller(Child):
    """A process that has imported the candidate's file and answers calls until it or its time ends.

    calls: texts of calls to answer first, each fetched with ``result``; said_s: the time limit to
    name in errors.
    """

    def __init__(
        self,
        connection: Connection,
        path: str,
        entry_point: str,
        timeout_s: float,
        calls: Sequence[str] = (),
        said_s: float | None = None,
    ):
        self.ended = False
        self._entry_point = entry_point
        self._said_s = timeout_s if said_s is None else said_s
        request = {
            "op": "call",
            "path": path,
            "entry_point": entry_point,
            "calls": list(calls),
            "more": not calls,
        }
        super().__init__(connection, request, timeout_s)

    def call(self, args: tuple, kwargs: dict[str, Any]) -> CallResult:
        """Calls the entry point. Raises ValueError for arguments that the wire does not carry."""
        text = call_text(self._entry_point, args, kwargs)
        # a process that is gone answers nothing, which is noticed below
        with contextlib.suppress(OSError):
            self.send(text)
        return self.result()

    def result(self) -> CallResult:
        """What the next call came to."""
        try:
            match self.receive():
                case ("value", value):
                    return CallResult(value, "", True)
                case ("error", str(name), str(message)):
                    error = one_line(f"{name}: {message}" if message else name)
                    return CallResult(
                        None, error, False, "exited" if name == "SystemExit" else "raised"
                    )
                case None:
                    self.ended = True
                    error, cause = self.ending(self._said_s)
                    return CallResult(None, error, False, cause)
                case _:
                    reason = "its frame is not one"
        except (OSError, wire.WireError) as error:
            reason = str(error)
        self.ended = True
        self._wait()
        return CallResult(None, f"the result cannot be read: {one_line(reason)}", False, "raised")


def one_line(text: str) -> str:
    """The text on one line, without what is not Unicode."""
    return " ".join(text.encode(errors="replace").decode().split())


def call_text(entry_point: str, args: tuple, kwargs: dict[str, Any]) -> str:
    """A call as the candidate's process reads it. Raises ValueError for arguments that the wire
    does not carry.
    """
    try:
        return wire.dumps((args, kwargs))
    except wire.WireError as error:
        raise ValueError(f"{entry_point} cannot be called in the sandbox: {error}") from error


def answer_text(result: CallResult) -> str:
    """A call's result as the proxy reads it. Where there is no exception to name, the name is
    empty.
    """
    if result.ok:
        return wire.dumps(("value", result.value))
    name, _, message = (
        result.error.partition(": ") if result.cause == "raised" else ("", "", result.error)
    )
    return wire.dumps(("error", name, message))
