"""Stopping between two steps: Ctrl-C and SIGTERM let the step in progress end and its checkpoint be written."""

from __future__ import annotations

import signal
from typing import Any


class Stopped(KeyboardInterrupt):
    """The run was asked to stop and did so after a whole step; its checkpoint is written."""


class StopRequest:
    """Ctrl-C and SIGTERM end the run after the step in progress; a second Ctrl-C ends it at once.

    A context manager for the main thread; ``requested`` tells whether the run should stop.
    """

    def __init__(self):
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this step; once more to stop at once", flush=True)
