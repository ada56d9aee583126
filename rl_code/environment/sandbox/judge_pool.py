"""Keeps judges: disposable processes that read what candidates answer (judge.py).

They are started when they are needed, kept for the next grading, and replaced when one dies or
exceeds its time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import marshal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_code.environment.sandbox.errors import SandboxFault
from rl_code.environment.sandbox.inside import wire
from rl_code.environment.sandbox.judge import READY, REPLY_BYTES

if TYPE_CHECKING:
    from rl_code.types import Case

_KEPT = 4
_START_S = 30.0
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from rl_code.environment.sandbox import judge; judge.main()"
)
_ROOT = str(Path(__file__).resolve().parents[3])


@dataclasses.dataclass(frozen=True)
class Question:
    """A call of the entry point. case: what its value is compared with; None wants the value."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    case: Case | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a judge says of one answer."""

    # "passed": the value is the expected one.
    # "wrong": it is another value. text: the beginning of its repr.
    # "value": nothing was expected. text: the value as on the wire.
    # "raised", "exited": an exception (SystemExit for "exited"). text: its name and message.
    # "forged": what came is no answer. text: why.
    # "costly": the judge was lost over the answer.
    # "ended": the process ended, or its time was up.
    # "refused": the arguments cannot be sent. text: why.
    kind: str
    # What belongs to the kind, as said above.
    text: str
    # Whether something in the value has an ``__eq__`` that lies.
    lying: bool = False


class Judges:
    """Judges for any number of threads; each uses one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Judge] = []
        self._closed = False

    def ask(
        self, channel: socket.socket, questions: Sequence[Question], timeout_s: float
    ) -> list[Verdict]:
        """Verdicts on the questions in order, up to the one after which the process answers no
        more ("ended", "forged", "costly", "refused").

        channel: to the candidate's process. timeout_s: after that the judge is given up, and the
        candidate blamed. Raises SandboxFault when no judge can be started.
        """
        try:
            data = _encoded(questions, timeout_s)
        except wire.WireError as error:
            return [Verdict("refused", str(error))]
        judge = self._take()
        try:
            verdicts, alive = judge.ask(channel, data, timeout_s)
        except BaseException:
            judge.close()
            raise
        if alive:
            self._give_back(judge)
        else:
            judge.close()
        return verdicts

    def close(self) -> None:
        """Ends all judges that are idle; one in use ends when it is given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for judge in idle:
            judge.close()

    def _take(self) -> _Judge:
        while True:
            with self._lock:
                judge = self._idle.pop() if self._idle else None
            if judge is None:
                return _Judge()
            if judge.alive():
                return judge
            judge.close()

    def _give_back(self, judge: _Judge) -> None:
        with self._lock:
            keep = not self._closed and len(self._idle) < _KEPT
            if keep:
                self._idle.append(judge)
        if not keep:
            judge.close()


class _Judge:
    """One process."""

    def __init__(self) -> None:
        self._control, remote = socket.socketpair()
        with remote:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", "-c", _START, _ROOT, str(remote.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=[remote.fileno()],
                    env={},
                    start_new_session=True,  # an interrupt at the terminal is the run's to handle
                )
            except OSError as error:
                self._control.close()
                raise SandboxFault(f"no process to read results: {error}") from error
        self._control.settimeout(_START_S)
        try:
            ready = self._control.recv(1)
        except OSError:
            ready = b""
        if ready != READY:
            # Otherwise a judge that cannot start would look like a candidate's costly value.
            self._process.kill()
            _, said = self._process.communicate()
            self._control.close()
            raise SandboxFault(f"no process to read results: {said.decode(errors='replace')}")

    def alive(self) -> bool:
        """Whether the process has not ended since it was last used."""
        return self._process.poll() is None

    def ask(
        self, channel: socket.socket, data: bytes, timeout_s: float
    ) -> tuple[list[Verdict], bool]:
        """The verdicts, and whether the judge can be used again. data: the encoded questions."""
        verdicts: list[Verdict] = []
        self._control.settimeout(timeout_s)
        try:
            sent = socket.send_fds(self._control, [data], [channel.fileno()])
            self._control.sendall(data[sent:])
            then = "more"
            while then == "more":
                frame = wire.read_frame(self._control, REPLY_BYTES)
                if frame is None:
                    raise ConnectionError("a value took too much time or memory to read")
                then, said = json.loads(frame)
                verdicts += [Verdict(*one) for one in said]
        except (OSError, wire.WireError) as error:
            return [*verdicts, Verdict("costly", str(error))], False
        return verdicts, then == "done"

    def close(self) -> None:
        """Ends the process."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def _encoded(questions: Sequence[Question], timeout_s: float) -> bytes:
    """A request: its length, its form, and the questions, plain values by marshal, which is fast,
    and others as on the wire. Raises WireError for arguments that do not travel.
    """
    rows = [
        (
            question.args,
            question.kwargs,
            question.case is not None,
            question.case and question.case.expected,
            question.case and question.case.tolerance,
        )
        for question in questions
    ]
    try:
        data, form = marshal.dumps((rows, timeout_s)), b"m"
    except ValueError:
        data, form = wire.dumps((rows, timeout_s)).encode(), b"w"
    return len(data).to_bytes(4, "little") + form + data
