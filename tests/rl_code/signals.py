"""Reward signals for tests, in the notation of a config."""

from __future__ import annotations

import functools
from typing import Any

from rl_code.config import read_config
from rl_code.environment.finished import Rewarder
from rl_code.rewards.combine import ActiveSignal, RewardConfig, combine, find_signals


def signals(*sections: str | dict[str, Any]) -> tuple[ActiveSignal, ...]:
    """The active signals of a config's ``reward.signals``; only "tests" when there is none."""
    config = {"signals": sections or ("tests",)}
    return find_signals(read_config.build(RewardConfig, config))


def rewarder(*sections: str | dict[str, Any]) -> Rewarder:
    """Function that pays an episode by these signals."""
    return functools.partial(combine, signals=signals(*sections))
