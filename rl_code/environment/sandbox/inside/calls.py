"""One call across the channel to a candidate's process, as the two trusted sides make it: the judge
(outside) and the checker (in a sandbox of its own).

Standard library only.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from . import wire
from .candidate import FRAME_BYTES, NUMBER_CHARACTERS


class Ended(Exception):
    """The process is gone, or its time is up."""


class Forged(Exception):
    """Raised for an answer that no honest process sends."""


def call_text(
    number: int | None,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    back: bool = False,
    functions: bool = False,
) -> str:
    """The text of a call.

    number: of a function that the process returned; None for the entry point. back: whether changed
    arguments are to come back. functions: whether functions in the value may be called later.
    Raises WireError for arguments that do not travel.
    """
    return wire.dumps((number, args, kwargs, back, functions))


def exchange(channel: socket.socket, call: str) -> tuple[str, str, bool]:
    """Sends a call and waits for its answer: its letter, its text, and whether a value in it lies.

    The number in front of a call is drawn anew, and the answer repeats it. What the candidate's
    code writes to the channel by itself therefore counts as forged, and not as the answer.

    Raises:
      Ended, Forged.
    """
    number = os.urandom(NUMBER_CHARACTERS // 2).hex()
    try:
        wire.write_frame(channel, number + call)
        answer = wire.read_frame(channel, FRAME_BYTES)
    except (OSError, wire.CutShort) as error:
        raise Ended(str(error)) from error
    except wire.WireError as error:
        raise Forged(str(error)) from error
    if answer is None:
        raise Ended("it has ended")
    letter = answer[:1].lower()
    if letter not in ("v", "a", "e") or answer[1 : 1 + NUMBER_CHARACTERS] != number:
        raise Forged("a frame that is no answer to the call")
    return letter, answer[1 + NUMBER_CHARACTERS :], answer[0] != letter
