"""A server that is killed while it samples: ``python -m tests.people.serving.killed <file>``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from people.feedback.records import AnswerRecord
from people.serving.begun import Begun
from tests.people.feedback.people import answer


def dead(id: str) -> AnswerRecord:
    """The record of an answer whose server was killed."""
    fields = dict(given=(), tokens=(), logprobs=(), versions=(), finish_reason="aborted")
    return answer(id, extra={"server_died": True}, **fields)


if __name__ == "__main__":
    begun = Begun(Path(sys.argv[1]))
    begun.begin([dead("a"), dead("b")])
    begun.end(["a"])
    begun.begin([dead("c")])
    os.kill(os.getpid(), signal.SIGKILL)
