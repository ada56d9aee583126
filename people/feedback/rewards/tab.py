"""Reward for a suggestion that is shown while one types (Tab).

As published for such a loop: +0.75 if it is accepted, -0.25 if it is rejected or typed past, 0 if
nothing is shown. A policy that maximises it shows exactly when the chance p of acceptance is above
1/4, since 0.75 p - 0.25 (1 - p) > 0 there and only there.
"""

from __future__ import annotations

import dataclasses

from people.feedback.rewards.answered import Answered


@dataclasses.dataclass(frozen=True)
class Tab:
    """Its fields set the chance above which showing pays: -rejected / (accepted - rejected)."""

    accepted: float = 0.75
    # Also for one that was shown and that nothing more is heard of until its window has closed.
    rejected: float = -0.25

    def __post_init__(self) -> None:
        if not self.rejected < 0 < self.accepted:
            raise ValueError(f"{self.rejected=} must be below 0 and {self.accepted=} above")

    @property
    def threshold(self) -> float:
        """The chance of acceptance above which showing a suggestion pays."""
        return -self.rejected / (self.accepted - self.rejected)

    def __call__(self, given: Answered) -> float:
        """Reward of an answer; 0 for one that nobody saw."""
        if given.accepted:
            return self.accepted
        return self.rejected if given.first("shown") or given.first("rejected") else 0.0
