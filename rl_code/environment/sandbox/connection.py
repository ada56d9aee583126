"""The host's end of one session: requests and answers, and whose fault it is when none comes."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

from rl_code.environment.sandbox.inside import session, wire
from rl_code.environment.sandbox.workers import Sandboxes, SandboxFault, Slot

# Seconds that a session may answer later than its command's time limit before it is given up.
GRACE_S = 20.0

_ERRORS = {
    kind.__name__: kind
    for kind in (
        FileNotFoundError,
        IsADirectoryError,
        NotADirectoryError,
        PermissionError,
        FileExistsError,
        ValueError,
    )
}


class Lost(Exception):
    """The session is gone, and a command of the candidate's is to blame."""


class Connection:
    """A session in a slot. After it is lost every request raises the same exception again.

    busy: a command answers on a socket of its own, and the session would take any request but one
    to stop it amiss.
    """

    def __init__(self, sandboxes: Sandboxes, slot: Slot):
        self.slot = slot
        self._sandboxes = sandboxes
        self._closed = False
        self.loss: Exception | None = None
        self.busy = False

    def ask(
        self, request: dict[str, Any], seconds: float = 0.0, *, of_candidate: bool = False
    ) -> Any:
        """The answer to a request that takes ``seconds`` at most.

        of_candidate: code of a candidate runs meanwhile. Raises what the session says it raised,
        Lost, SandboxFault.
        """
        self.send(request, of_candidate=of_candidate)
        return self.receive(seconds, of_candidate=of_candidate)

    def send(
        self, request: dict[str, Any], passed: Sequence[int] = (), *, of_candidate: bool = False
    ) -> None:
        """Sends a request, with descriptors for the session. Raises Lost, SandboxFault."""
        if self._closed:
            raise ValueError("the sandbox is closed")
        if self.busy:
            raise ValueError(f"{request['op']} while a caller of the same sandbox is open")
        if self.loss:
            raise self.loss
        data = json.dumps(request).encode()
        data = len(data).to_bytes(4, "little") + data
        try:
            self.slot.channel.settimeout(GRACE_S)
            sent = socket.send_fds(self.slot.channel, [data], list(passed)) if passed else 0
            self.slot.channel.sendall(data[sent:])
        except OSError as error:
            raise self._lose(error, of_candidate) from error

    def receive(self, seconds: float, *, of_candidate: bool = False) -> Any:
        """The answer to the request sent before, as ``ask`` gives it."""
        try:
            self.slot.channel.settimeout(seconds + GRACE_S)
            frame = wire.read_frame(self.slot.channel, session.FRAME_BYTES)
        except (OSError, wire.WireError) as error:
            raise self._lose(error, of_candidate) from error
        answer = {} if frame is None else json.loads(frame)
        if "ok" in answer:
            return answer["ok"]
        if "error" in answer:
            name, message = answer["error"]
            raise _ERRORS.get(name, OSError)(message)
        raise self._lose(OSError(f"the session ended: {answer}"), of_candidate)

    def close(self) -> None:
        """Ends the session. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self.loss or self.busy:
            self._sandboxes.discard(self.slot)
        else:
            self._sandboxes.give_back(self.slot)

    def _lose(self, error: Exception, of_candidate: bool) -> Exception:
        """What to raise when the session is gone or does not answer."""
        if of_candidate and self._sandboxes.blames_commands(self.slot):
            self.loss = Lost("a command brought the sandbox down")
        else:
            self.loss = SandboxFault(f"the sandbox has failed: {error}")
        return self.loss
