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
    "slowest". Two calls before them compile the program and find how many calls a run needs; where
    that is one, the second is the first of several runs. It may have to fetch memory for temporary
    arrays, so it is never the only one.

    Where the process's CPU is the device, "cpu_seconds" is the median of its seconds on all cores,
    which other processes beside it change less.
    """
    jax.block_until_ready(run())
    second = _seconds(run, 1)
    calls = min(MOST_CALLS, math.ceil(LEAST_S / second[0]))
    found = [second] if calls == 1 < repeats else []
    found += [_seconds(run, calls) for _ in range(repeats - len(found))]
    seconds = sorted(x for x, _ in found)
    times = dict(seconds=statistics.median(seconds), fastest=seconds[0], slowest=seconds[-1])
    if jax.default_backend() == "cpu":
        times["cpu_seconds"] = statistics.median(x for _, x in found)
    return times


def _seconds(run: Callable[[], Any], calls: int) -> tuple[float, float]:
    """(Seconds, seconds of the process's CPU) of one of several calls, which a device makes one
    after another.
    """
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        last = run()
    jax.block_until_ready(last)
    spent = time.perf_counter() - begin, time.process_time() - cpu
    return max(1e-9, spent[0] / calls), max(1e-9, spent[1] / calls)
