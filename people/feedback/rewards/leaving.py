"""Penalties for a person who goes: to another model, or away."""

from __future__ import annotations

import dataclasses

from people.feedback.rewards.answered import Answered

_DAY_S = 86_400.0


def switched(given: Answered) -> float:
    """-1 if the person asked another model within the session, after this answer; otherwise 0."""
    return -1.0 if given.value("switched") > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Left:
    """-1 if the person did not come back, said within n days after this answer; otherwise 0."""

    # Days. What is said later has many other causes.
    within_days: float = 7.0

    def __post_init__(self) -> None:
        if not self.within_days > 0:
            raise ValueError(f"{self.within_days=} must be above 0")

    def __call__(self, given: Answered) -> float:
        """-1 or 0."""
        return -1.0 if given.soon("left", self.within_days * _DAY_S) > 0 else 0.0
