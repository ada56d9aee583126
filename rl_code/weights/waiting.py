"""Waits that end: deadlines, and what the processes of one program agree on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rl_code.weights.versions import Wanted, WeightTimeout

POLL_S = 0.05  # between two looks at a shared folder
GRACE_S = 10.0  # that processes of one program may be apart beyond their common deadline


class Deadline:
    """A moment from now."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then, not below 0."""
        return max(0.0, self._end - time.monotonic())

    def wait(self, condition: Callable[[], bool], poll_s: float = POLL_S) -> bool:
        """Waits until the condition holds; False if the moment came first."""
        while not condition():
            if not self.left():
                return False
            time.sleep(min(poll_s, self.left()))
        return True


def within(seconds: float, function: Callable[[], Any], waiting: str) -> Any:
    """The function's result; raises WeightTimeout, which begins with ``waiting``, when it takes
    longer.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:  # raised below, where it is waited for
            outcome.append((None, error))

    # one that never ends must not keep the program alive
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise WeightTimeout(f"{waiting} waited {seconds:g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def agree(seconds: float, waiting: str, *values: int) -> list[tuple[int, ...]]:
    """Values that every process of this program passed (int32), by its index; all of them have to
    call.
    """
    if jax.process_count() == 1:
        return [values]
    waiting = f"process {jax.process_index()} of {jax.process_count()}, {waiting}, for the others"
    gather = lambda: multihost_utils.process_allgather(np.asarray(values, np.int32))  # noqa: E731
    return [tuple(int(value) for value in row) for row in within(seconds, gather, waiting)]


def timed_out(
    who: str,
    seconds: float,
    wanted: Wanted,
    publisher: str,
    newest: tuple[int, float] | None,
    where: str,
) -> WeightTimeout:
    """The error of a wait for a version; newest: number of the newest that was seen, and seconds
    since then.
    """
    seen = (
        "no version seen"
        if newest is None
        else f"newest seen: {newest[0]}, written {newest[1]:.0f} s ago"
    )
    return WeightTimeout(
        f"{who} waited {seconds:g} s for {wanted} from {publisher} ({seen}, in {where})"
    )
