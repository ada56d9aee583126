"""Replies of the store of answers and events: outcomes of events, selections, deletions."""

from __future__ import annotations

import dataclasses
from typing import Literal


class SelectionChanged(ValueError):
    """Error: a selection no longer holds. Answers were deleted, or another cycle has them. A new
    selection leaves them out.
    """


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of one event of a client."""

    key: str
    # recorded: now. repeated: before. waiting: recorded, and its answer is not there yet. refused:
    # not recorded, since its answer is another user's, was never given, or has too many events.
    status: Literal["recorded", "repeated", "waiting", "refused"]
    # More about it in words; may be "".
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The answers that a cycle trains on."""

    # In the order in which they were recorded.
    ids: tuple[str, ...]
    # SHA-256 of the ids and of their events.
    digest: str
    # Unix seconds: events that were received later do not count.
    watermark: float
    # Number of sessions that the answers belong to.
    sessions: int
    # Answers left out although no cycle has used them: of versions outside of the window, those
    # that were cut off, and those that wait for what people do with them (``waiting.Wait``).
    outside: int = 0
    aborted: int = 0
    waiting: int = 0


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """Counts of the answers that a cycle was trained on, and of those deleted since."""

    cycle: int
    watermark: float
    digest: str
    answers: int
    sessions: int
    outside: int
    # Answers that went since: their person asked for it, or they were too old. A version that was
    # trained on deleted ones still holds what it learned from them.
    deleted: int
    expired: int


@dataclasses.dataclass(frozen=True)
class Deleted:
    """Counts of what a deletion removed, and the cycles it concerns."""

    answers: int
    events: int
    # The cycles whose training set held such answers.
    cycles: tuple[int, ...]
