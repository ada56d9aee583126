"""Watches a command from outside its pid namespace: output, time, and its end.

Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from typing import Any

from .command import Cell
from .meter import Meter

PIPE_BYTES = 1 << 16
# The exit code that stands for a command whose time was up.
TIMED_OUT = 124
NOTHING = memoryview(b"")


class Output:
    """The beginning and the end of a stream, ``limit`` bytes together, and how long it was."""

    def __init__(self, limit: int):
        self._half = max(1, limit // 2)
        self._head = b""
        self._tail = b""
        self._total = 0

    def add(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
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


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The host's next request and the descriptors sent with it; None when the host has gone."""
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


def watch(
    channel: socket.socket,
    cell: Cell,
    command: int,
    meter: Meter,
    timeout: float,
    output: int = -1,
    collected: Output | None = None,
    stdin: int = -1,
    feed: memoryview = NOTHING,
) -> dict[str, Any]:
    """Waits until the command ends, a limit is reached or the host says stop, then kills what is
    left.

    command: pid of the command in the cell. output, stdin: descriptors of its pipes, closed here;
    -1 for none.

    Returns status (an exit code), timed_out (wall-clock), exceeded (a limit, see Meter, or ""),
    seconds (wall-clock) and cpu_s (CPU seconds of all its processes).
    """
    start = time.monotonic()
    process = os.pidfd_open(command)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(channel, select.POLLIN)
    if output >= 0:
        poll.register(output, select.POLLIN)
        os.set_blocking(stdin, False)
        poll.register(stdin, select.POLLOUT)
    ended = timed_out = False
    exceeded = ""
    next_look = start + meter.pause_s()
    while not ended:
        now = time.monotonic()
        timed_out = now >= start + timeout
        if timed_out:
            break
        if now >= next_look:
            exceeded = meter.exceeded()
            next_look = now + meter.pause_s()
        if exceeded:
            break
        for descriptor, event in poll.poll((min(start + timeout, next_look) - now) * 1000):
            if descriptor == process:
                ended = True
            elif descriptor == channel.fileno():
                if receive(channel) is None:
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
    # Without a cgroup what a process has used is gone once it is killed.
    cpu_s = meter.cpu_s()
    status = cell.end(command)
    os.close(process)
    if stdin >= 0:
        os.close(stdin)
    if collected is not None:
        while data := os.read(output, PIPE_BYTES):
            collected.add(data)
        os.close(output)
    return {
        "status": status,
        "timed_out": timed_out,
        "exceeded": exceeded,
        "seconds": seconds,
        "cpu_s": max(cpu_s, meter.cpu_s()),
    }


def _feed(stdin: int, feed: memoryview) -> memoryview:
    """Bytes that are left to write to the command's standard input; none when nobody reads it."""
    try:
        return feed[os.write(stdin, feed) :] if feed else feed
    except BlockingIOError:
        return feed
    except BrokenPipeError:
        return feed[:0]
