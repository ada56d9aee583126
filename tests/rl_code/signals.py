"""Reward signals for tests, in the notation of a config."""

from __future__ import annotations

from typing import Any

from rl_code import read_config
from rl_code.rewards.combine import ActiveSignal, RewardConfig, find_signals


def signals(*sections: str | dict[str, Any]) -> tuple[ActiveSignal, ...]:
    """The active signals of a config's ``reward.signals``; only "tests" when there is none."""
    config = {"signals": sections or ("tests",)}
    return find_signals(read_config.build(RewardConfig, config))
