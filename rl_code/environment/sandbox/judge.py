"""The judge: a process on the host that reads what candidates answer. It may be lost at any time.

It gets the channel to a candidate's process, and the questions with the expected values. It sends
one question at a time, in the order given, decodes the answer and compares it. So neither the
training process nor the candidate's holds both the answer and the expected value. A candidate may
send a value that takes seconds or gigabytes to decode. That costs only the life of this process,
which has a limit of memory, and a limit of CPU time for each large value. ``judge_pool`` starts
judges and replaces them.

Runs by itself, ``python -I -S``: standard library only, and nothing of the project that imports
more than that.
"""

from __future__ import annotations

import dataclasses
import json
import marshal
import os
import signal
import socket
from typing import Any

from rl_code.environment import compare
from rl_code.environment.sandbox.inside import calls, meter, wire
from rl_code.environment.tools.text import show

# A process that holds more memory than this makes room for a fresh one.
RETIRE_BYTES = 100 << 20
# CPU seconds for one value; an answer of fewer bytes than SMALL cannot cost a noticeable time.
VALUE_CPU_S = 1.0
SMALL_BYTES = 2048
# Limits of a value that goes back to the training process, where it is decoded again.
RETURN_BYTES = 1 << 16
RETURN_ELEMENTS = 2000
SHOWN = 1600
REPLY_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Case:
    """Expected value and tolerance with which a value is compared; see ``types.Case``."""

    expected: Any
    tolerance: float | None


def main(control: socket.socket) -> None:
    """Serves until the other side closes."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(control, 5, 1)
        if len(head) < 5:
            return
        data = wire.read_exactly(control, int.from_bytes(head[:4], "little"))
        if data is None:
            return
        questions, timeout_s = marshal.loads(data) if head[4:] == b"m" else wire.loads(data)
        with socket.socket(fileno=descriptors[0]) as channel:
            channel.settimeout(timeout_s)
            verdicts = _answer(control, channel, questions)
        retire = meter.resident(os.getpid()) > RETIRE_BYTES
        _say(control, verdicts, "retire" if retire else "done")


def _answer(
    control: socket.socket, channel: socket.socket, questions: list[Any]
) -> list[tuple[str, str, bool]]:
    """Asks all questions, or until the process has ended; the verdicts not said yet."""
    verdicts: list[tuple[str, str, bool]] = []
    for args, kwargs, compared, expected, tolerance in questions:
        lying = False
        try:
            text = calls.call_text(None, args, kwargs)
        except wire.WireError as error:
            verdicts.append(("refused", str(error), False))
            break
        try:
            letter, answer, lying = calls.exchange(channel, text)
            if len(answer) > SMALL_BYTES:
                # The verdicts so far are sent before the risk of a large answer is taken.
                _say(control, verdicts, "more")
                verdicts = []
            signal.setitimer(signal.ITIMER_PROF, VALUE_CPU_S)  # its signal ends the process
            case = Case(expected, tolerance) if compared else None
            kind, said = _verdict(letter, answer, case)
            signal.setitimer(signal.ITIMER_PROF, 0)
        except calls.Ended:
            kind, said = "ended", ""
        except (calls.Forged, wire.WireError) as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            kind, said = "forged", str(error)
        verdicts.append((kind, said[:RETURN_BYTES], lying))
        if kind in ("ended", "forged"):
            break
    return verdicts


def _say(control: socket.socket, verdicts: list[tuple[str, str, bool]], then: str) -> None:
    """Sends verdicts. then: "more" follow, this was all ("done"), or all for ever ("retire")."""
    wire.write_frame(control, json.dumps([then, verdicts]))


def _verdict(letter: str, answer: str, case: Case | None) -> tuple[str, str]:
    """The kind of a verdict (see ``judge_pool.Verdict``) and its text. Raises WireError."""
    value, elements = wire.read(answer)
    if letter == "e":
        match value:
            case (str(name), list(), str(message), tuple(), dict()):
                text = f"{name}: {message}" if message else name
                return "exited" if name == "SystemExit" else "raised", text[:SHOWN]
        raise wire.WireError("an exception without its parts")
    if letter == "a":
        raise wire.WireError("changed arguments that nobody asked for")
    if case is None:
        if len(answer) > RETURN_BYTES or elements > RETURN_ELEMENTS:
            return "raised", "ValueError: it returned a value too large to take back"
        return "value", answer
    try:
        passed = compare.accepts(case, value)
    except (ArithmeticError, TypeError, ValueError):  # values that cannot be compared: sNaN
        passed = False
    return ("passed", "") if passed else ("wrong", show(value)[:SHOWN])
