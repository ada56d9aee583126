"""The host's end of one session: requests, answers, and who is to blame when no answer comes."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

from rl_code.environment.sandbox.errors import CandidateLost, SandboxFault
from rl_code.environment.sandbox.inside import wire
from rl_code.environment.sandbox.workers import Sandboxes, Slot

# Seconds that a session may answer later than its command's time limit before it is given up.
GRACE_S = 20.0

# Errors that the session may name as the kind of its error; any other name becomes OSError.
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


class Connection:
    """A session in a slot. After it is lost every request raises the same exception again.

    Who is to blame for a loss is decided by one rule. Once code of a candidate has run in the
    session, a loss is the candidate's failure (CandidateLost), because the host cannot tell an
    accident from sabotage, and sabotage must not pay. Before that, or when the pool was closed by
    its owner, the loss is the host's (SandboxFault).
    """

    def __init__(self, sandboxes: Sandboxes, slot: Slot):
        self.slot = slot
        self._sandboxes = sandboxes
        self._closed = False
        # True if code of a candidate may have run in this session.
        self._used = False
        # True if the command sent last was the first one.
        self._first_command = False
        self.loss: CandidateLost | SandboxFault | None = None
        # A command answers on a socket of its own. Meanwhile the session would take any request
        # for the one that stops the command, so there must be no other.
        self.busy = False
        # CPU seconds of all commands that have ended.
        self.cpu_s = 0.0

    def ask(
        self, request: dict[str, Any], seconds: float = 0.0, *, of_candidate: bool = False
    ) -> Any:
        """The answer to a request that takes ``seconds`` at most.

        of_candidate: code of a candidate runs meanwhile. Raises what the session says it raised,
        CandidateLost or SandboxFault.
        """
        self.send(request, of_candidate=of_candidate)
        return self.receive(seconds, of_candidate=of_candidate)

    def send(
        self, request: dict[str, Any], passed: Sequence[int] = (), *, of_candidate: bool = False
    ) -> None:
        """Sends a request, with descriptors for the session. Raises CandidateLost, SandboxFault."""
        if self._closed:
            raise ValueError("the sandbox is closed")
        if self.busy:
            raise ValueError(f"{request['op']} while a caller of the same sandbox is open")
        if self.loss:
            raise self.loss
        # From now on a loss counts as the candidate's: afterwards nobody can say how far its
        # command had got.
        if of_candidate:
            self._first_command = not self._used
            self._used = True
        data = json.dumps(request).encode()
        data = len(data).to_bytes(4, "little") + data
        try:
            self.slot.channel.settimeout(GRACE_S)
            sent = socket.send_fds(self.slot.channel, [data], list(passed)) if passed else 0
            self.slot.channel.sendall(data[sent:])
        except OSError as error:
            raise self._lose(error) from error

    def receive(self, seconds: float, *, of_candidate: bool = False) -> Any:
        """The answer to the request sent before, as ``ask`` gives it."""
        try:
            self.slot.channel.settimeout(seconds + GRACE_S)
            answer = wire.read_json(self.slot.channel, self._sandboxes.frame_bytes)
        except (OSError, wire.WireError) as error:
            raise self._lose(error) from error
        match answer:
            case {"ok": value}:
                if of_candidate:  # how a command ended
                    self.cpu_s += value["cpu_s"]
                return value
            case {"error": [_, str(message)]} if of_candidate:
                # The session could not even start the command. In a session that no candidate has
                # touched the machine is short of something; otherwise the candidate used it up.
                self._used = not self._first_command
                raise self._lose(OSError(message))
            case {"error": [str(name), str(message)]}:
                raise _ERRORS.get(name, OSError)(message)
        raise self._lose(OSError(f"the session ended: {answer}"))

    def close(self) -> None:
        """Ends the session. May be called twice."""
        if self._closed:
            return
        self._closed = True
        # A slot is used again only if its session answers and no command runs in it any more.
        if self.loss or self.busy:
            self._sandboxes.discard(self.slot)
        else:
            self._sandboxes.give_back(self.slot)

    def _lose(self, error: Exception) -> CandidateLost | SandboxFault:
        """Exception to raise when the session is gone or does not answer."""
        if self._used and not self._sandboxes.closed:
            self.loss = CandidateLost("a command brought the sandbox down")
        else:
            self.loss = SandboxFault(f"the sandbox has failed: {error}")
        return self.loss
