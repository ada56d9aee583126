"""One episode inside the sandbox: answers the host's requests and runs commands, each in a fork
that is then killed.

Requests and answers are frames of JSON (wire.py). After a command every other process of the
session is dead, so requests about files never race with the candidate. Runs inside the sandbox:
standard library only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from . import candidate, files, wire

WORKSPACE = "/workspace"
INODES = 8192
OPEN_FILES = 256
FRAME_BYTES = 256 << 20
PIPE_BYTES = 1 << 16
PR_SET_DUMPABLE = 4
TIMED_OUT = 124
NOTHING = memoryview(b"")

libc = ctypes.PyDLL(None, use_errno=True)


def serve(channel: socket.socket, limits: dict[str, Any]) -> None:
    """Answers requests until the host says close or goes away."""
    os.chdir(WORKSPACE)
    requests = {
        "run": lambda request, passed: _run(channel, limits, request),
        "call": lambda request, passed: _fork_with(channel, limits, request, passed, _call),
        "check": lambda request, passed: _fork_with(channel, limits, request, passed, _check),
        "write": lambda request, passed: files.write(WORKSPACE, request["files"]),
        "read": lambda request, passed: files.read(WORKSPACE, request["path"], request["limit"]),
        "list": lambda request, passed: files.paths(WORKSPACE),
        "snapshot": lambda request, passed: files.snapshot(WORKSPACE, request["limit"]),
    }
    while (frame := _receive(channel)) is not None:
        request, passed = frame
        if request["op"] == "close":
            return
        if request["op"] == "stop":  # of a command that has ended by itself meanwhile
            continue
        try:
            answer = {"ok": requests[request["op"]](request, passed)}
        except (OSError, ValueError) as error:
            message = (
                f"{error.strerror}: {request.get('path', '')}"
                if getattr(error, "strerror", None)
                else str(error)
            )
            answer = {"error": [type(error).__name__, message]}
        wire.write_frame(channel, json.dumps(answer))


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and the descriptors sent with it."""
    head, passed, _, _ = socket.recv_fds(channel, 4, 1)
    if not head:
        return None
    size = int.from_bytes(head, "little")
    parts = []
    while size:
        part = channel.recv(size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return json.loads(b"".join(parts)), passed


def _run(channel: socket.socket, limits: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Runs a program: its output (both streams), exit code, whether it was stopped, seconds, bytes
    cut.
    """
    output, output_end = os.pipe()
    stdin_end, stdin = os.pipe()

    def child() -> NoReturn:
        for descriptor, number in ((stdin_end, 0), (output_end, 1), (output_end, 2)):
            os.dup2(descriptor, number)
        os.closerange(3, OPEN_FILES)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            os.execvpe(request["argv"][0], request["argv"], limits["environment"])
        except OSError as error:
            os.write(2, f"{request['argv'][0]}: {error.strerror}\n".encode())
            os._exit(126 if isinstance(error, PermissionError) else 127)

    try:
        pid = _fork(limits, child)
    except OSError:
        for descriptor in (output, stdin):
            os.close(descriptor)
        raise
    finally:
        os.close(output_end)
        os.close(stdin_end)
    collected = _Output(limits["output_bytes"])
    feed = memoryview(request["stdin"].encode("utf-8", "surrogatepass"))
    ended = _supervise(channel, pid, request["timeout"], output, collected, stdin, feed)
    text, cut = collected.text()
    return {**ended, "output": text, "cut": cut}


def _fork_with(
    channel: socket.socket,
    limits: dict[str, Any],
    request: dict[str, Any],
    passed: list[int],
    work: Callable[[socket.socket, dict[str, Any]], None],
) -> dict[str, Any]:
    """Does ``work`` in a fork that holds the passed socket."""

    def child() -> NoReturn:
        os.dup2(passed[0], 3)
        os.closerange(4, OPEN_FILES)
        own = socket.socket(fileno=3)
        random.seed(0)
        gc.enable()
        sys.argv[:] = [""]
        sys.path.insert(0, WORKSPACE)
        work(own, request)
        os._exit(0)

    try:
        pid = _fork(limits, child)
    finally:
        os.close(passed[0])
    return _supervise(channel, pid, request["timeout"])


def _call(own: socket.socket, request: dict[str, Any]) -> None:
    candidate.serve(own, request["path"], request["entry_point"], request["calls"], request["more"])


def _check(own: socket.socket, request: dict[str, Any]) -> None:
    candidate.check(own, request["entry_point"], request["statements"])


def _fork(limits: dict[str, Any], child: Callable[[], NoReturn]) -> int:
    """The pid of a fork that runs ``child`` under the limits of a command."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        os.chdir(WORKSPACE)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        _prefer_as_victim()
        memory = limits["memory_mb"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
        child()
    finally:  # whatever happens, this process never goes on as a session
        os._exit(125)


def _prefer_as_victim() -> None:
    """Where memory runs out the kernel takes this process before the session, which holds the
    workspace.
    """
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(descriptor, b"1000")
    os.close(descriptor)


def _supervise(
    channel: socket.socket,
    pid: int,
    timeout: float,
    output: int = -1,
    collected: _Output | None = None,
    stdin: int = -1,
    feed: memoryview = NOTHING,
) -> dict[str, Any]:
    """Waits for a command, for its time to be up or for the host, then kills whatever the session
    still runs.
    """
    start = time.monotonic()
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(channel, select.POLLIN)
    if output >= 0:
        poll.register(output, select.POLLIN)
        os.set_blocking(stdin, False)
        poll.register(stdin, select.POLLOUT)
    ended = timed_out = False
    while not ended:
        left = start + timeout - time.monotonic()
        timed_out = left <= 0
        if timed_out:
            break
        for descriptor, event in poll.poll(left * 1000):
            if descriptor == process:
                ended = True
            elif descriptor == channel.fileno():
                frame = _receive(channel)
                if frame is None:
                    os._exit(0)
                ended = True  # the only thing the host says meanwhile is stop
            elif descriptor == output and collected is not None:
                data = os.read(output, PIPE_BYTES)
                collected.add(data)
                if not data:
                    poll.unregister(output)
            elif descriptor == stdin:
                feed = _feed(stdin, feed)
                if not feed or event & select.POLLERR:
                    poll.unregister(stdin)
                    os.close(stdin)
                    stdin = -1
    seconds = time.monotonic() - start
    status = _kill_all(pid)
    os.close(process)
    if stdin >= 0:
        os.close(stdin)
    if collected is not None:
        while data := os.read(output, PIPE_BYTES):
            collected.add(data)
        os.close(output)
    return {"status": status, "timed_out": timed_out, "seconds": seconds}


def _feed(stdin: int, feed: memoryview) -> memoryview:
    """What is left to write to the command's standard input; nothing when nobody reads it."""
    try:
        return feed[os.write(stdin, feed) :] if feed else feed
    except BlockingIOError:
        return feed
    except BrokenPipeError:
        return feed[:0]


def _kill_all(pid: int) -> int:
    """Kills every process of the session but this one; the exit code of ``pid`` (128 + signal when
    killed).
    """
    code = 0
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            reaped, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        if reaped == pid:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code


class _Output:
    """The beginning and the end of a stream, ``limit`` bytes together, and how long it was."""

    def __init__(self, limit: int):
        self._half = max(1, limit // 2)
        self._head = b""
        self._tail = b""
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        taken = self._half - len(self._head)
        self._head += data[:taken]
        self._tail = (self._tail + data[taken:])[-self._half :]

    def text(self) -> tuple[str, int]:
        """The text, with a note where it was cut, and how many bytes were."""
        cut = self._total - len(self._head) - len(self._tail)
        if not cut:
            return (self._head + self._tail).decode(errors="replace"), 0
        note = f"\n[{cut} bytes cut]\n"
        return self._head.decode(errors="replace") + note + self._tail.decode(errors="replace"), cut
