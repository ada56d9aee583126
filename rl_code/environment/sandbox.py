"""Sandboxes for code that nobody has read: one per episode, opened in milliseconds.

A pool keeps a few bubblewrap workers (bubblewrap.py), each with a warm interpreter (zygote.py) that forks a session per
sandbox into namespaces of its own; the session (session.py) forks a process per command. Everything said here about
the other side is said by the session, which runs no code of the candidate's; only the channel of ``call`` and ``check``
carries what a candidate wrote, and is read as such (wire.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rl_code.environment import candidate, session, wire
from rl_code.environment.workers import (
    Mode,
    SandboxConfig,
    Sandboxes,
    SandboxFault,
    SandboxUnavailable,
    Slot,
)

# What users of sandboxes need is found here, wherever it is defined.
__all__ = [
    "CallResult",
    "Caller",
    "Completed",
    "Mode",
    "Sandbox",
    "SandboxConfig",
    "SandboxFault",
    "SandboxPool",
    "SandboxUnavailable",
]

# Seconds that a sandbox may answer later than its command's time limit before it is given up.
GRACE_S = 20.0
READ_BYTES = 1 << 20
SNAPSHOT_BYTES = 4 << 20

_ERRORS = {
    kind.__name__: kind
    for kind in (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, FileExistsError, ValueError)
}

# Exit code of what a signal 9 ended, and what the signals of limits mean.
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
class Completed:
    """How a command ended.

    stdout: standard output and error as they came, cut in the middle. exit_code: 128 + signal when killed by one, 124
    when its time was up. cut_bytes: how much output was left out. seconds: wall-clock time.
    """

    stdout: str
    exit_code: int
    timed_out: bool
    cut_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class CallResult:
    """What one call came to. value: made of exact builtin types. error: one line, "" when ok.

    cause: "" when ok, else "raised", "exited" (sys.exit, os._exit), "killed" (a crash or a limit), "timeout", "not_run"
    (an earlier call used up the time).
    """

    value: Any
    error: str
    ok: bool
    cause: str = ""


class SandboxPool:
    """Opens sandboxes, many at once and from any thread.

    modes: ways to isolate, the first that works is taken; () stands for all, the strongest first. Raises
    SandboxUnavailable, saying what to do, where none works.
    """

    def __init__(self, config: SandboxConfig, modes: Sequence[Mode] = ()):
        self._sandboxes = Sandboxes(config, modes)

    def open(self, files: Mapping[str, str]) -> Sandbox:
        """A sandbox whose workspace holds ``files`` (relative path -> text).

        Raises:
          ValueError: a path that is absolute or leads out, or files that do not fit the workspace.
          SandboxFault: no sandbox could be started.
        """
        for path in files:
            if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
                raise ValueError(f"the path {path!r} does not stay inside the workspace")
        for attempt in (1, 2, 3):
            slot = self._sandboxes.take()
            try:
                answer = _exchange(slot.channel, {"op": "write", "files": dict(files)}, GRACE_S)
            except (OSError, wire.WireError) as error:
                self._sandboxes.discard(slot)
                if attempt == 3:
                    raise SandboxFault(f"a sandbox did not start: {error}") from error
                continue
            if "ok" in answer:
                return Sandbox(self._sandboxes, slot)
            self._sandboxes.discard(slot)
            if "fault" in answer:
                raise SandboxFault(f"a sandbox did not start: {answer['fault']}")
            raise ValueError(f"the files {', '.join(files)} could not be written: {answer['error'][1]}")
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Ends all sandboxes and everything in them."""
        self._sandboxes.close()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Sandbox:
    """One episode's workspace and processes. One thread at a time; close it when the episode ends.

    A command that brings down its own sandbox (by exhausting its memory) has failed, and so does what follows: commands
    end with code 137, files are not found. Any other loss raises SandboxFault.
    """

    def __init__(self, sandboxes: Sandboxes, slot: Slot):
        self._sandboxes = sandboxes
        self._slot = slot
        self._closed = False
        self._loss: Exception | None = None  # raised by everything that comes after it

    def run(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float) -> Completed:
        """Runs a program in the workspace, then kills every process that it has left behind."""
        if not argv or any("\0" in word for word in argv):
            raise ValueError(f"{argv=} must name a program, without NUL characters")
        request = {"op": "run", "argv": list(argv), "stdin": stdin, "timeout": timeout_s}
        try:
            answer = self._ask(request, timeout_s, of_candidate=True)
        except _Lost as lost:
            return Completed(f"{lost}\n", KILLED, False, 0, 0.0)
        code = session.TIMED_OUT if answer["timed_out"] else answer["status"]
        return Completed(answer["output"], code, answer["timed_out"], answer["cut"], answer["seconds"])

    def call(self, path: str, entry_point: str, args: Sequence[tuple], *, timeout_s: float) -> list[CallResult]:
        """``entry_point(*args)`` of the file at ``path`` for each tuple of arguments, in a fork of a warm interpreter.

        timeout_s: for all calls together. After a call that ended the process the others run in a new one. What the
        code prints is dropped. Raises ValueError for arguments that the wire does not carry.
        """
        texts = [_call_text(entry_point, tuple(one), {}) for one in args]
        deadline = time.monotonic() + timeout_s
        results: list[CallResult] = []
        while len(results) < len(texts):
            if results and (results[-1].cause in ("timeout", "not_run") or self._loss):
                results.append(CallResult(None, "not run: an earlier call used up the time", False, "not_run"))
                continue
            left = max(deadline - time.monotonic(), 0.0)
            with Caller(self, path, entry_point, left, texts[len(results) :], said_s=timeout_s) as caller:
                while len(results) < len(texts) and not caller.ended:
                    results.append(caller.result())
        return results

    def check(
        self, entry_point: str, statements: Sequence[str], answer: Callable[..., CallResult], *, timeout_s: float
    ) -> list[str]:
        """Runs trusted tests in which ``entry_point`` is a proxy: one error each, "" for one that passed.

        answer: called as ``answer(args, kwargs)`` for each call of the proxy.
        """
        errors: list[str] = []
        request = {"op": "check", "entry_point": entry_point, "statements": list(statements)}
        with _Child(self, request, timeout_s) as child:
            while len(errors) < len(statements):
                try:
                    match child.receive():
                        case ("done", str(error)):
                            errors.append(error)
                        case ("call", tuple(args), dict(kwargs)):
                            child.send(_answer_text(answer(args, kwargs)))
                        case _:
                            break
                except (OSError, wire.WireError):
                    break
            ending = "" if len(errors) == len(statements) else child.ending(timeout_s)[0]
        return errors + [ending] * (len(statements) - len(errors))

    def read_file(self, path: str) -> str:
        """A file's text. Raises FileNotFoundError, another OSError, or ValueError for what is no text or too long."""
        return self._files({"op": "read", "path": path, "limit": READ_BYTES}, path)

    def write_file(self, path: str, text: str) -> None:
        """Writes a file and its folders. Raises OSError: no space left, a path that leads out, a folder."""
        self._files({"op": "write", "files": {path: text}}, path)

    def list_files(self) -> list[str]:
        """Paths of the regular files of the workspace, sorted; links are not followed."""
        return self._files({"op": "list"}) or []

    def snapshot(self) -> dict[str, str]:
        """Path -> text of the regular files that are UTF-8, SNAPSHOT_BYTES in all; links are not followed."""
        return self._files({"op": "snapshot", "limit": SNAPSHOT_BYTES}) or {}

    def close(self) -> None:
        """Ends every process of the sandbox and frees its memory. May be called twice."""
        if not self._closed:
            self._closed = True
            if self._loss:
                self._sandboxes.discard(self._slot)
            else:
                self._sandboxes.give_back(self._slot)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _files(self, request: dict[str, Any], path: str = "") -> Any:
        """The answer to a request about files, or what the session raised; None where a question has no path."""
        if "\0" in path:
            raise ValueError(f"the path {path!r} contains a NUL character")
        try:
            return self._ask(request, 0, of_candidate=False)
        except _Lost as lost:
            if not path:
                return None
            raise FileNotFoundError(f"{path}: {lost}") from lost

    def _ask(self, request: dict[str, Any], seconds: float, *, of_candidate: bool) -> Any:
        """The answer to a request that takes ``seconds`` at most, or the error that it names."""
        self._send(request, of_candidate=of_candidate)
        return self._receive(seconds, of_candidate=of_candidate)

    def _send(self, request: dict[str, Any], passed: Sequence[int] = (), *, of_candidate: bool) -> None:
        """Sends a request. Raises _Lost or SandboxFault."""
        if self._closed:
            raise ValueError("the sandbox is closed")
        if self._loss:
            raise self._loss
        try:
            _send(self._slot.channel, request, passed)
        except OSError as error:
            raise self._lose(error, of_candidate) from error

    def _receive(self, seconds: float, *, of_candidate: bool) -> Any:
        """The answer to the request sent. Raises _Lost, SandboxFault or the error that the answer names."""
        try:
            answer = _receive(self._slot.channel, seconds + GRACE_S)
        except (OSError, wire.WireError) as error:
            raise self._lose(error, of_candidate) from error
        if "ok" in answer:
            return answer["ok"]
        if "error" in answer:
            name, message = answer["error"]
            raise _ERRORS.get(name, OSError)(message)
        raise self._lose(OSError(f"the session ended: {answer}"), of_candidate)

    def _lose(self, error: Exception, of_candidate: bool) -> Exception:
        """What to raise when the session is gone or does not answer, now and from now on.

        While a command runs it is the command that brought its session down, unless the whole worker is gone.
        """
        if of_candidate and self._sandboxes.blames_commands(self._slot):
            self._loss = _Lost("a command brought the sandbox down")
        else:
            self._loss = SandboxFault(f"the sandbox has failed: {error}")
        return self._loss


class _Lost(Exception):
    """The session is gone, and a command of the candidate's is to blame."""


class _Child:
    """A fork of the session that talks over a socket of its own. Nothing it says is trusted."""

    def __init__(self, sandbox: Sandbox, request: dict[str, Any], timeout_s: float):
        self._sandbox = sandbox
        self._seconds = timeout_s
        self._channel, remote = socket.socketpair()
        self._channel.settimeout(timeout_s + GRACE_S)
        self._ending: dict[str, Any] | None = None
        with remote:
            try:
                sandbox._send({**request, "timeout": timeout_s}, [remote.fileno()], of_candidate=True)
            except _Lost:
                self._ending = _BROUGHT_DOWN
            except BaseException:
                self._channel.close()
                raise

    def send(self, text: str) -> None:
        """Sends a frame. Raises OSError when the process is gone."""
        wire.write_frame(self._channel, text)

    def receive(self) -> Any:
        """The value of the next frame; None when the process has ended. Raises OSError, WireError."""
        frame = wire.read_frame(self._channel, candidate.FRAME_BYTES)
        return None if frame is None else wire.loads(frame)

    def ending(self, said_s: float) -> tuple[str, str]:
        """Ends the process, if it has not; why it ended, in words and as the cause of a CallResult."""
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
            with contextlib.suppress(_Lost):
                self._sandbox._send({"op": "stop"}, of_candidate=True)
                self._ending = self._sandbox._receive(GRACE_S, of_candidate=True)
        return self._ending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._wait()
        finally:
            self._channel.close()


class Caller(_Child):
    """A process that has imported the candidate's file and answers calls until it or its time ends.

    calls: texts of calls to answer first, with ``receive_result``; said_s: the time limit to name in errors.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        path: str,
        entry_point: str,
        timeout_s: float,
        calls: Sequence[str] = (),
        said_s: float | None = None,
    ):
        self.ended = False
        self._entry_point = entry_point
        self._said_s = timeout_s if said_s is None else said_s
        request = {"op": "call", "path": path, "entry_point": entry_point, "calls": list(calls), "more": not calls}
        super().__init__(sandbox, request, timeout_s)

    def call(self, args: tuple, kwargs: dict[str, Any]) -> CallResult:
        """Calls the entry point. Raises ValueError for arguments that the wire does not carry."""
        text = _call_text(self._entry_point, args, kwargs)
        with contextlib.suppress(OSError):  # a process that is gone answers nothing, which is noticed below
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
                    return CallResult(None, error, False, "exited" if name == "SystemExit" else "raised")
                case None:
                    self.ended = True
                    error, cause = self.ending(self._said_s)
                    return CallResult(None, error, False, cause)
                case _:
                    reason = "its frame is not one"
        except (OSError, wire.WireError) as error:
            reason = str(error)
        self.ended = True
        return CallResult(None, f"the result cannot be read: {one_line(reason)}", False, "raised")


def one_line(text: str) -> str:
    """The text with every run of white space made one space."""
    return " ".join(text.split())


def _call_text(entry_point: str, args: tuple, kwargs: dict[str, Any]) -> str:
    try:
        return wire.dumps((args, kwargs))
    except wire.WireError as error:
        raise ValueError(f"{entry_point} cannot be called in the sandbox: {error}") from error


def _answer_text(result: CallResult) -> str:
    """A call's result as the proxy reads it. Where there is no exception to name, the name is empty."""
    if result.ok:
        return wire.dumps(("value", result.value))
    name, _, message = result.error.partition(": ") if result.cause == "raised" else ("", "", result.error)
    return wire.dumps(("error", name, message))


def _exchange(channel: socket.socket, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    _send(channel, request)
    return _receive(channel, seconds)


def _send(channel: socket.socket, request: dict[str, Any], passed: Sequence[int] = ()) -> None:
    data = json.dumps(request).encode()
    data = len(data).to_bytes(4, "little") + data
    channel.settimeout(GRACE_S)
    sent = socket.send_fds(channel, [data], list(passed)) if passed else 0
    channel.sendall(data[sent:])


def _receive(channel: socket.socket, seconds: float) -> dict[str, Any]:
    """The session's answer. Raises OSError, TimeoutError after ``seconds``, WireError."""
    channel.settimeout(seconds)
    frame = wire.read_frame(channel, session.FRAME_BYTES)
    if frame is None:
        raise ConnectionResetError("the session's connection has closed")
    return json.loads(frame)
