"""Reward (a price, never positive) for calls that could not be understood."""

from __future__ import annotations

from rl_code.rewards.outcome import Outcome, RewardConfig


def malformed(outcome: Outcome, config: RewardConfig) -> float:
    """Minus ``malformed_penalty`` for each malformed call."""
    return -config.malformed_penalty * outcome.malformed_calls if outcome.malformed_calls else 0.0
