"""Clocks: that of the machine, and one that moves when it is told to."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Tells the time and calls back later."""

    def now(self) -> float:
        """Unix seconds."""
        ...

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls once, so many seconds from now."""
        ...


class LoopClock:
    """The machine's clock; calls back on the running event loop."""

    def now(self) -> float:
        return time.time()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, call)


class ManualClock:
    """Stands still until it is moved."""

    def __init__(self, start: float = 0.0):
        self._now = start
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self._now

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self._now + seconds, next(self._numbers), call))

    def move(self, seconds: float) -> None:
        """Goes ahead, and makes the calls that are due at their times, in order."""
        end = self._now + seconds
        while self._calls and self._calls[0][0] <= end:
            self._now, _, call = heapq.heappop(self._calls)
            call()
        self._now = end
