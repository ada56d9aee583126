"""Reward for a pull request that has the answer's change. It is rare and late, but it is what the
work was for.

Whoever sends the event says so, and nothing here compares the answer with a diff. So pay it only
where a program of yours, which has matched the two, sends the events.
"""

from __future__ import annotations

import dataclasses

from people.feedback.rewards.answered import Answered


@dataclasses.dataclass(frozen=True)
class Merged:
    """1 for one that was merged, less for one that is only opened."""

    opened: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.opened <= 1:
            raise ValueError(f"{self.opened=} must be within 0 and 1, what a merged one earns")

    def __call__(self, given: Answered) -> float:
        """0 to 1."""
        if given.value("merged") > 0:
            return 1.0
        return self.opened if given.value("opened") > 0 else 0.0
