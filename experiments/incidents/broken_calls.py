"""Outcomes of episodes with a broken call: how they are credited, and how often they occur.

People react to each suggestion once, so there is no group of answers to one task, and the baseline
is the same for all tasks. An episode that is left out of training then earns exactly the baseline:
less than a right answer, and more than a wrong one. So a policy that cannot solve a task does best
to break its call, unless the broken call counts as the failure that it is.

With a group's own mean as the baseline this way out is closed: the credits of the others add up to
0, so that leaving an episode out is worth as much as the mean of the others, on every task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.incidents.tasks import by_clarity
from rl_code.learner.advantages import rewards_of
from rl_code.types import Group, Trajectory


@dataclasses.dataclass(frozen=True)
class Credited:
    """An advantage: the reward minus a baseline. Where broken calls are dropped, an episode with
    one has the credit 0, which leaves its tokens out of the gradient.
    """

    # Whether episodes with a broken call are left out.
    drop: bool
    # The baseline; None for the mean of the group's episodes that are not left out.
    baseline: float | None

    def __call__(self, group: Group) -> np.ndarray:
        rewards, counts = rewards_of(group)
        if self.drop:
            counts = counts & ~np.array([is_broken(one) for one in group.trajectories], bool)
        if not counts.any():
            return np.zeros(len(rewards), np.float32)
        baseline = rewards[counts].mean() if self.baseline is None else self.baseline
        return np.where(counts, rewards - baseline, 0.0).astype(np.float32)


def is_broken(trajectory: Trajectory) -> bool:
    """True if a call of the episode could not be understood."""
    return trajectory.malformed_calls > 0


@dataclasses.dataclass(frozen=True)
class BrokenCalls:
    """Shares of a step's episodes with a broken call, and of those that solve their task:
    calls/broken_clear and calls/solved_clear of tasks that say all that is wanted,
    calls/broken_unclear and calls/solved_unclear of the others.
    """

    def __call__(self, groups: Sequence[Group], learner: Mapping[str, Any]) -> Mapping[str, float]:
        found = {}
        for name, ones in by_clarity(groups):
            found[f"calls/broken_{name}"] = float(np.mean([is_broken(one) for one in ones]))
            found[f"calls/solved_{name}"] = float(np.mean([one.solved for one in ones]))
        return found
