"""The post between a simulated person and the server: events that come late, never, or twice.

What is posted is repeated with the same keys until the server has it, as every client does.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from people.feedback.records import Event
from people.simulated.client import ServerRefused

# Hands events to the server, as ``Client.report``.
type Send = Callable[[Sequence[Event]], object]
# Kinds that come long after the answer.
_RARE = ("opened", "merged", "left")


class Sender(Protocol):
    """Chances that an event of a person comes late, never, or twice."""

    @property
    def late(self) -> float: ...

    @property
    def lost(self) -> float: ...

    @property
    def twice(self) -> float: ...


class Post:
    """Sends events when they are due, in a thread of its own; one for many persons."""

    def __init__(self, late_s: float, clock: Callable[[], float] = time.monotonic):
        """late_s: average seconds by which a late event comes later, and a rare one always."""
        self._late_s, self._clock = late_s, clock
        self._due: list[tuple[float, int, Send, list[Event]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    def take(
        self, events: Sequence[Event], habits: Sender, rng: random.Random, send: Send
    ) -> list[Event]:
        """Take events of one person. What need not wait is sent at once; the events that are lost
        are returned.
        """
        now: list[Event] = []
        lost = []
        for event in events:
            is_lost, is_late, is_twice = (
                rng.random() < chance for chance in (habits.lost, habits.late, habits.twice)
            )
            wait_s = rng.expovariate(1 / self._late_s) if self._late_s else 0.0
            if is_lost:
                lost.append(event)
                continue
            if is_late or event.kind in _RARE:
                self._keep(wait_s, send, [event])
            else:
                now.append(event)
            if is_twice:
                self._keep(wait_s, send, [event])
        if now:
            send(now)
        return lost

    def _keep(self, wait_s: float, send: Send, events: list[Event]) -> None:
        with self._changed:
            item = self._clock() + wait_s, next(self._numbers), send, events
            heapq.heappush(self._due, item)
            self._changed.notify()

    def deliver(self, *, everything: bool = False) -> int:
        """Sends what is due, or all; the number of events that still wait."""
        while True:
            with self._changed:
                if not self._due or (self._due[0][0] > self._clock() and not everything):
                    return len(self._due)
                _, _, send, events = heapq.heappop(self._due)
            try:
                send(events)
            except ServerRefused as error:
                print(error, file=sys.stderr, flush=True)

    def run(self) -> None:
        """Delivers for ever."""
        while True:
            self.deliver()
            with self._changed:
                wait_s = self._due[0][0] - self._clock() if self._due else 1.0
                self._changed.wait(min(max(wait_s, 0.01), 1.0))
