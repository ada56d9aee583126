"""Reward from tests: full iff every required test passes (visible and hidden), otherwise nothing or
a fraction.
"""

from __future__ import annotations

from rl_code.rewards.outcome import Outcome, RewardConfig


def tests(outcome: Outcome, config: RewardConfig) -> float:
    """``full`` when the task is solved, else 0."""
    return config.full if outcome.solved else 0.0


def partial(outcome: Outcome, config: RewardConfig) -> float:
    """``partial_weight`` times the fraction of hidden tests passed, for submitted work that is not
    a solution.
    """
    if outcome.solved or not outcome.submitted or not outcome.hidden:
        return 0.0
    return config.partial_weight * sum(outcome.hidden) / len(outcome.hidden)
