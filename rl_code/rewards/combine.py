"""All reward signals by name, and their sum."""

from __future__ import annotations

from collections.abc import Callable

from rl_code.rewards.malformed import malformed
from rl_code.rewards.outcome import Outcome, RewardConfig
from rl_code.rewards.tests import partial, tests
from rl_code.types import Reward

REWARDS: dict[str, Callable[[Outcome, RewardConfig], float]] = {
    "tests": tests,
    "partial": partial,
    "malformed": malformed,
}


def combine(outcome: Outcome, config: RewardConfig, flags: tuple[str, ...]) -> Reward:
    """The reward of a finished episode: its total is the sum of its components."""
    components = {name: signal(outcome, config) for name, signal in REWARDS.items()}
    return Reward(sum(components.values()), components, flags)
