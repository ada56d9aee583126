"""Stopping between two steps: Ctrl-C and SIGTERM let the step in progress end and its checkpoint be
written.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

# Exit code of a command that was asked to stop by Ctrl-C or SIGTERM.
INTERRUPTED = 130
_SAME_S = 1.0


class Stopped(KeyboardInterrupt):
    """The run was asked to stop and did so after a whole step; its checkpoint is written."""


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM inside ``deferred`` into ``requested``. Any other one ends
    the program at once.

    A signal within a second of the first counts as the same request, since a terminal, a launcher
    and a supervisor may each pass it on. A context manager for the main thread, which puts the
    previous handlers back when it is left.

    then: called at once, in the handler of the signal, so it should only note what is so.
    """

    def __init__(self, then: Callable[[], None] = lambda: None):
        self.requested = False
        self._then = then
        self._requested_at = 0.0
        self._deferring = False

    def __enter__(self) -> StopRequest:
        self._previous = {
            number: signal.signal(number, self._request)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Around a loop that looks at ``requested`` after every step."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    @property
    def agreed(self) -> bool:
        """True if any process of this program was asked to stop; all of them have to call this."""
        import jax
        import numpy as np
        from jax.experimental import multihost_utils

        if jax.process_count() == 1:
            return self.requested
        return bool(np.any(multihost_utils.process_allgather(np.int32(self.requested))))

    def _request(self, number: int, frame: Any) -> None:
        if self.requested and time.monotonic() - self._requested_at < _SAME_S:
            return
        if self.requested or not self._deferring:
            raise KeyboardInterrupt
        self.requested = True
        self._requested_at = time.monotonic()
        self._then()
        print("\nstopping after this step; once more to stop at once", flush=True)
