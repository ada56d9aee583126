"""Penalty for making a person wait."""

from __future__ import annotations

import dataclasses
import math

from people.feedback.rewards.answered import Answered


@dataclasses.dataclass(frozen=True)
class Latency:
    """Minus a weighted sum of the seconds to the first token and to the end of the answer."""

    # Per second until the first token came, and per second until the answer was whole.
    first: float = 0.02
    whole: float = 0.005

    def __post_init__(self) -> None:
        if not (0 <= self.first < math.inf and 0 <= self.whole < math.inf):
            raise ValueError(f"{self.first=} and {self.whole=} must be at least 0 and finite")

    def __call__(self, given: Answered) -> float:
        """At most 0. The signal's cap in the config says how bad it can be."""
        answer = given.answer
        # clocks can be set back while an answer is made
        whole_s = max(answer.answered_at - answer.asked_at, 0.0)
        return -(self.first * max(answer.first_token_s, 0.0) + self.whole * whole_s)
