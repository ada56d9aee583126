"""Penalty for an edit that the person changes soon afterwards, or takes back."""

from __future__ import annotations

import dataclasses

from people.feedback.rewards.answered import Answered


@dataclasses.dataclass(frozen=True)
class ReEdited:
    """Minus the share of the edit's tokens that the person changed, or took back: the greater."""

    # Seconds after the answer; later changes are the person's own work.
    within_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.within_s > 0:
            raise ValueError(f"{self.within_s=} must be above 0")

    def __call__(self, given: Answered) -> float:
        """-1 to 0."""
        return -max(given.soon("edited", self.within_s), given.soon("reverted", self.within_s))
