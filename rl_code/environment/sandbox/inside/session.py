"""The supervisor of one episode inside the sandbox: answers the host's requests and runs commands.

Requests and answers are frames of JSON (wire.py). A command runs in a pid namespace of its own that
is gone before the answer is written (command.py), so requests about files never race with the
candidate. Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from . import candidate, checker, difference, files, service, supervise, wire
from .command import OPEN_FILES, Cell
from .meter import LOOK_S, Meter
from .world import World

FRAME_BYTES = 256 << 20


def serve(channel: socket.socket, limits: dict[str, Any]) -> None:
    """Answers requests until the host says close or goes away."""
    world = World(limits)
    cell = Cell(limits, world)
    requests = {
        "world": lambda request, passed: world.open(request),
        "run": lambda request, passed: _run(channel, cell, limits, request, passed),
        "call": lambda request, passed: _fork_with(channel, cell, limits, request, passed, _call),
        "check": lambda request, passed: _fork_with(channel, cell, limits, request, passed, _check),
        "serve": lambda request, passed: _fork_with(
            channel, cell, limits, request, passed, service.Service(world).serve, service.LOOK_S
        ),
        "write": lambda request, passed: files.write(world.folder, request["files"]),
        "read": lambda request, passed: files.read(
            world.place(request["at"]), request["path"], request["limit"]
        ),
        "list": lambda request, passed: files.paths(world.folder, request["below"]),
        "restore": lambda request, passed: difference.restore(
            world.place(request["at"]), request["files"]
        ),
        "snapshot": lambda request, passed: files.snapshot(
            difference.changed(world.changes, world.below, world.folder)
            if world.changes
            else files.everything(world.folder),
            limits["snapshot_mb"] << 20,
            limits["snapshot_files"],
        ),
    }
    while (frame := supervise.receive(channel)) is not None:
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
        # Made while the host is busy elsewhere. If it fails, so does the next command, in words.
        with contextlib.suppress(OSError):
            cell.prepare()


def _run(
    channel: socket.socket,
    cell: Cell,
    limits: dict[str, Any],
    request: dict[str, Any],
    passed: list[int],
) -> dict[str, Any]:
    """Runs a program: its output (both streams), how it ended, bytes of output cut.

    passed: a socket that the program gets as its descriptor ``request["channel"]``, if any.
    """
    output, output_end = os.pipe()
    stdin_end, stdin = os.pipe()

    def program() -> NoReturn:
        for descriptor, number in ((stdin_end, 0), (output_end, 1), (output_end, 2)):
            os.dup2(descriptor, number)
        kept = request["channel"] if passed else OPEN_FILES
        if passed:
            os.dup2(passed[0], kept)
        os.closerange(3, kept)
        os.closerange(kept + 1, OPEN_FILES)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            os.execvpe(request["argv"][0], request["argv"], cell.world.environment)
        except OSError as error:
            os.write(2, f"{request['argv'][0]}: {error.strerror}\n".encode())
            os._exit(126 if isinstance(error, PermissionError) else 127)

    meter = Meter(limits)
    try:
        pid = cell.start(program)
    except OSError:
        for descriptor in (output, stdin):
            os.close(descriptor)
        raise
    finally:
        for descriptor in (output_end, stdin_end, *passed):
            os.close(descriptor)
    collected = supervise.Output(limits["output_bytes"])
    feed = memoryview(request["stdin"].encode("utf-8", "surrogatepass"))
    ended = supervise.watch(
        channel, cell, pid, meter, request["timeout"], output, collected, stdin, feed
    )
    text, cut = collected.text()
    return {**ended, "output": text, "cut": cut}


def _fork_with(
    channel: socket.socket,
    cell: Cell,
    limits: dict[str, Any],
    request: dict[str, Any],
    passed: list[int],
    work: Callable[[socket.socket, dict[str, Any]], None],
    look_s: float = LOOK_S,
) -> dict[str, Any]:
    """Does ``work`` in a fork that holds the passed socket. look_s: as for Meter."""

    def program() -> NoReturn:
        os.dup2(passed[0], 3)
        os.closerange(4, OPEN_FILES)
        own = socket.socket(fileno=3)
        random.seed(0)
        gc.enable()
        sys.argv[:] = [""]
        sys.path[:0] = [cell.world.workspace, *cell.world.packages]
        work(own, request)
        os._exit(0)

    meter = Meter(limits, look_s)
    try:
        pid = cell.start(program)
    finally:
        os.close(passed[0])
    return supervise.watch(channel, cell, pid, meter, request["timeout"])


def _call(own: socket.socket, request: dict[str, Any]) -> None:
    candidate.serve(own, request["path"], request["entry_point"])


def _check(own: socket.socket, request: dict[str, Any]) -> None:
    checker.check(own, request["entry_point"], request["statements"])
