"""Timing of a compiled program on a device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

# A timed run lasts about so long or longer, seconds: a shorter call is made several times in it.
# Otherwise the time of starting a call on an accelerator, some tens of microseconds, would count.
LEAST_S = 0.02
MOST_CALLS = 1000


def spread(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Seconds of one call, of ``repeats`` timed runs: the median ("seconds"), and the "fastest" and
    "slowest". Two calls before them compile the program and find how many calls a run needs.
    """
    jax.block_until_ready(run())
    calls = min(MOST_CALLS, math.ceil(LEAST_S / _seconds(run, 1)))
    found = sorted(_seconds(run, calls) for _ in range(repeats))
    return dict(seconds=statistics.median(found), fastest=found[0], slowest=found[-1])


def _seconds(run: Callable[[], Any], calls: int) -> float:
    """Seconds of one of several calls, which a device makes one after another."""
    begin = time.perf_counter()
    for _ in range(calls):
        last = run()
    jax.block_until_ready(last)
    return max(1e-9, (time.perf_counter() - begin) / calls)
