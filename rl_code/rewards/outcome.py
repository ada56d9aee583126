"""What is known about a finished episode when its reward is computed, and the numbers that price
it.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished episode as the grader and the episode loop saw it.

    submitted: whether the agent handed its work in; only then was it graded.
    visible, hidden: passed or not, test by test, in the order of the task; empty when not graded.
    malformed_calls: calls that could not be understood.
    """

    submitted: bool
    visible: tuple[bool, ...]
    hidden: tuple[bool, ...]
    malformed_calls: int

    @property
    def solved(self) -> bool:
        """Whether every required test ran and passed."""
        required = self.visible + self.hidden
        return self.submitted and bool(required) and all(required)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Prices.

    full: reward of a solved task. partial_weight: reward of a submitted, unsolved one times the
    fraction of its hidden tests that pass; below ``full``. malformed_penalty: taken off for each
    malformed call, at least 0.
    """

    full: float
    partial_weight: float
    malformed_penalty: float

    def __post_init__(self) -> None:
        if not 0 <= self.partial_weight < self.full:
            raise ValueError(f"{self.partial_weight=} must be at least 0 and below {self.full=}")
        if self.malformed_penalty < 0:
            raise ValueError(f"{self.malformed_penalty=} must be at least 0")
