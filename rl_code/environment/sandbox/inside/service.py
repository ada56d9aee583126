"""Programs that go on between the calls of an episode: language servers, MCP servers, parsers.

A command ends before its answer is read, so such programs need a sandbox of their own, beside the
episode's and with a copy of its files (``environment.servers.companion``). The process here starts
them there, keeps the files equal to the episode's, and tells what the programs changed. It runs
among them, so the host trusts nothing that it says. Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from typing import Any

from . import difference, files, supervise, wire
from .command import OPEN_FILES
from .world import PROGRAMS, World

# Seconds between two looks at what such programs use: they are idle most of the time.
LOOK_S = 0.5
# Bytes of a program's standard error that are kept: its end, which says why it stopped.
SAID_BYTES = 2000
NOT_FOUND = 127


class Service:
    """Answers the host's requests until it goes away."""

    def __init__(self, world: World):
        self._world = world
        # Pid, exit code (None while it runs), standard error and its end, of each program.
        self._pids: list[int] = []
        self._exits: list[int | None] = []
        self._errors: list[int] = []
        self._said: list[bytes] = []
        # State of every file when the host looked last.
        self._marked: dict[str, tuple] = {}

    def serve(self, channel: socket.socket, request: dict[str, Any]) -> None:
        """Frames of JSON in, frames of JSON out."""
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor != channel.fileno():
                    if descriptor in self._errors:  # not closed by an answer meanwhile
                        self._listen(self._errors.index(descriptor), poll)
                    continue
                if (frame := supervise.receive(channel)) is None:
                    return
                try:
                    answer = {"ok": self._answer(*frame, poll)}
                except (OSError, ValueError) as error:
                    answer = {"error": str(error)}
                wire.write_frame(channel, json.dumps(answer))

    def _answer(self, request: dict[str, Any], passed: list[int], poll: select.poll) -> Any:
        match request["op"]:
            case "start":
                return self._start(request["argv"], request["environment"], passed[0], poll)
            case "state":
                return self._state(request["program"], poll)
            case "put":
                return self._put(request["deleted"], request["files"])
            case "mark":
                self._marked = self._look()
                return None
            case "changes":
                return self._changes(request["bytes"], request["count"])
        raise ValueError(f"no request {request['op']!r}")

    def _start(
        self, argv: list[str], environment: dict[str, str], stream: int, poll: select.poll
    ) -> int:
        """Starts a program that talks over ``stream``; its number."""
        everything = {**self._world.environment, **environment}
        everything["PATH"] = f"{PROGRAMS}:{everything['PATH']}"
        error, error_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                for descriptor, number in ((stream, 0), (stream, 1), (error_end, 2)):
                    os.dup2(descriptor, number)
                os.closerange(3, OPEN_FILES)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                os.execvpe(argv[0], argv, everything)
            except OSError as reason:
                os.write(2, f"{argv[0]}: {reason.strerror}\n".encode())
            finally:
                os._exit(NOT_FOUND)
        os.close(stream)
        os.close(error_end)
        os.set_blocking(error, False)
        poll.register(error, select.POLLIN)
        self._pids.append(pid)
        self._exits.append(None)
        self._errors.append(error)
        self._said.append(b"")
        return len(self._pids) - 1

    def _listen(self, program: int, poll: select.poll) -> bool:
        """Keeps the end of what a program writes to its standard error; whether there was more."""
        descriptor = self._errors[program]
        try:
            data = os.read(descriptor, supervise.PIPE_BYTES) if descriptor >= 0 else b""
        except BlockingIOError:
            return False
        self._said[program] = (self._said[program] + data)[-SAID_BYTES:]
        if not data and descriptor >= 0:
            poll.unregister(descriptor)
            os.close(descriptor)
            self._errors[program] = -1
        return bool(data)

    def _state(self, program: int, poll: select.poll) -> dict[str, Any]:
        """The exit code of a program, None while it runs, and the end of what it said."""
        if self._exits[program] is None:
            pid, status = os.waitpid(self._pids[program], os.WNOHANG)
            self._exits[program] = os.waitstatus_to_exitcode(status) if pid else None
        if self._exits[program] is not None:
            while self._listen(program, poll):
                pass
        return {"exit": self._exits[program], "said": self._said[program].decode(errors="replace")}

    def _put(self, deleted: list[str], entries: dict[str, Any]) -> None:
        """Deletes paths, then lays entries of a snapshot over the workspace."""
        gone = {"content": "", "mode": 0, "kind": files.DELETED}
        difference.restore(self._world.workspace, dict.fromkeys(deleted, gone))
        difference.restore(self._world.workspace, entries)

    def _look(self) -> dict[str, tuple]:
        """State of every file, link and empty folder, which differs if the file was changed."""
        seen = {}
        for path, full, kind in files.everything(self._world.workspace):
            status = None if full is None else os.lstat(full)
            seen[path] = (
                (kind,)
                if status is None
                else (kind, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            )
        return seen

    def _changes(self, most_bytes: int, most_files: int) -> dict[str, Any]:
        """Files that were deleted or changed since the last mark, which moves to now."""
        before = self._marked
        self._marked = self._look()
        changed = (
            (path, full, kind)
            for path, full, kind in files.everything(self._world.workspace)
            if before.get(path) != self._marked.get(path)
        )
        entries = files.snapshot(changed, most_bytes, most_files)
        return {"files": entries, "deleted": sorted(before.keys() - self._marked.keys())}
