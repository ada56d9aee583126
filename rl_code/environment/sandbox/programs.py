"""Programs that go on between calls, seen from the host (inside/service.py is the other end).

Nothing that comes from there is trusted: answers are short, and their form is checked.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rl_code.environment.sandbox.caller import Child
from rl_code.environment.sandbox.connection import Connection
from rl_code.environment.sandbox.inside import files, wire
from rl_code.environment.sandbox.snapshot import File, from_session, to_session

# Seconds that programs may live. Their CPU time is limited by the sandbox.
_LIFETIME_S = 7 * 86400.0


class ProgramsLost(OSError):
    """The programs have ended, or their messages cannot be read."""


class Changes(NamedTuple):
    """Changes of the files of a workspace."""

    # New and changed files.
    files: dict[str, str | File]
    # Paths that are gone.
    deleted: list[str]


class Programs(Child):
    """Programs in a sandbox, in which nothing else can run until this is closed.

    frame_bytes: the longest answer that is read. After ProgramsLost was raised all further calls
    raise it.
    """

    def __init__(self, connection: Connection, frame_bytes: int):
        self._frame_bytes = frame_bytes
        self._lost = ""
        super().__init__(connection, {"op": "serve"}, _LIFETIME_S)

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], deadline: float
    ) -> tuple[int, socket.socket]:
        """Starts a program; its number, and the host's end of its standard input and output.

        deadline: on the clock of time.monotonic. Raises ProgramsLost.
        """
        stream, remote = socket.socketpair()
        request = {"op": "start", "argv": list(argv), "environment": dict(environment)}
        with remote:
            try:
                number = self._ask(request, deadline, [remote.fileno()])
            except BaseException:
                stream.close()
                raise
        if not isinstance(number, int):
            stream.close()
            raise self._lose("the number of a program is none")
        return number, stream

    def state(self, program: int, deadline: float) -> tuple[int | None, str]:
        """The exit code of a program, None while it runs, and the end of its standard error.
        Raises ProgramsLost.
        """
        match self._ask({"op": "state", "program": program}, deadline):
            case {"exit": int() | None as code, "said": str(said)}:
                return code, said
        raise self._lose("the state of a program is none")

    def put(self, changes: Changes, deadline: float) -> None:
        """Changes the files of the sandbox. Raises ProgramsLost, or ValueError where it cannot."""
        entries = to_session(changes.files)
        self._ask({"op": "put", "files": entries, "deleted": changes.deleted}, deadline)

    def mark(self, deadline: float) -> None:
        """Lets ``changes`` begin here. Raises ProgramsLost, or ValueError where it cannot."""
        self._ask({"op": "mark"}, deadline)

    def changes(self, most_bytes: int, most_files: int, deadline: float) -> Changes:
        """Changes that the programs made to the files since the last mark, which moves to now.

        Raises ProgramsLost, or ValueError for files that a snapshot cannot hold.
        """
        asked = {"op": "changes", "bytes": most_bytes, "count": most_files}
        answer = self._ask(asked, deadline)
        try:
            found = from_session(answer["files"])
            deleted = [str(path) for path in answer["deleted"]]
            for path in [*found, *deleted]:
                files.check_depth(path)
                if path.startswith("/") or ".." in path.split("/") or "\0" in path:
                    raise ValueError(f"{path[:80]!r} is outside the workspace")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._lose(f"the changes of files cannot be read: {error}") from error
        return Changes(found, deleted)

    def _ask(self, request: dict[str, Any], deadline: float, passed: Sequence[int] = ()) -> Any:
        """The answer to a request. Raises ProgramsLost, or ValueError with what went wrong."""
        if self._lost:
            raise ProgramsLost(self._lost)
        data = json.dumps(request).encode()
        data = len(data).to_bytes(4, "little") + data
        try:
            self.channel.settimeout(max(deadline - time.monotonic(), 0.01))
            sent = socket.send_fds(self.channel, [data], list(passed)) if passed else 0
            self.channel.sendall(data[sent:])
            answer = wire.read_json(self.channel, self._frame_bytes)
        except (OSError, wire.WireError) as error:
            raise self._lose(str(error)) from error
        match answer:
            case {"ok": value}:
                return value
            case {"error": str(message)}:
                raise ValueError(message)
        raise self._lose("they have ended")

    def _lose(self, reason: str) -> ProgramsLost:
        self._lost = reason
        return ProgramsLost(reason)
