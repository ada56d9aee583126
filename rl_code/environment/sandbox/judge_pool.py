"""Asks judges: disposable processes that read what candidates answer (judge.py, kept.py)."""

from __future__ import annotations

import dataclasses
import marshal
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_code.environment.sandbox import judge
from rl_code.environment.sandbox.inside import wire
from rl_code.environment.sandbox.judge import REPLY_BYTES
from rl_code.environment.sandbox.kept import KeptProcesses

if TYPE_CHECKING:
    from rl_code.types import Case


@dataclasses.dataclass(frozen=True)
class Question:
    """A call of the entry point. case: what its value is compared with; None wants the value."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    case: Case | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Verdict of a judge on one answer."""

    # "passed": the value is the expected one.
    # "wrong": it is another value. text: the beginning of its repr.
    # "value": nothing was expected. text: the value as on the wire.
    # "raised", "exited": an exception (SystemExit for "exited"). text: its name and message.
    # "forged": what came is no answer. text: why.
    # "costly": the judge was lost over the answer.
    # "ended": the process ended, or its time was up.
    # "refused": the arguments cannot be sent. text: why.
    kind: str
    # The text that belongs to the kind, as said above.
    text: str
    # True if something in the value has an ``__eq__`` that lies.
    lying: bool = False


class Judges:
    """Judges for any number of threads; each uses one at a time."""

    def __init__(self) -> None:
        self._processes = KeptProcesses(judge.__name__)

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
        process = self._processes.take()
        try:
            verdicts, alive = _ask(process.control, channel, data, timeout_s)
        except BaseException:
            process.close()
            raise
        if alive:
            self._processes.give_back(process)
        else:
            process.close()
        return verdicts

    def close(self) -> None:
        """Ends all judges that are idle; one in use ends when it is given back."""
        self._processes.close()


def _ask(
    control: socket.socket, channel: socket.socket, data: bytes, timeout_s: float
) -> tuple[list[Verdict], bool]:
    """A judge's verdicts, and whether it can be used again. data: the encoded questions."""
    verdicts: list[Verdict] = []
    control.settimeout(timeout_s)
    try:
        sent = socket.send_fds(control, [data], [channel.fileno()])
        control.sendall(data[sent:])
        then = "more"
        while then == "more":
            answer = wire.read_json(control, REPLY_BYTES)
            if answer is None:
                raise ConnectionError("a value took too much time or memory to read")
            then, said = answer
            verdicts += [Verdict(*one) for one in said]
    except (OSError, ValueError, TypeError) as error:  # WireError is a ValueError
        return [*verdicts, Verdict("costly", str(error))], False
    return verdicts, then == "done"


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
