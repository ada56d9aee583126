"""Metrics of each step, on the trajectories that it trains on. Each task is used once, so
these are measured on tasks that the policy has not seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.tab.asked import PAID, Asked, suggested
from rl_code.types import Group, Trajectory

COMPONENT = "asked"


@dataclasses.dataclass(frozen=True)
class Shown:
    """One suggestion that was shown."""

    # Geometric mean of the chances of its tokens under the policy, and whether it was accepted.
    confidence: float
    accepted: bool
    # Whether the file's comment states the constants, so that the text can be known.
    stated: bool


def shown(group: Group, trajectory: Trajectory) -> Shown | None:
    """The suggestion that an episode showed; None for nothing."""
    if not suggested(trajectory).strip():
        return None
    logprobs = trajectory.logprobs[trajectory.sampled]
    confidence = float(np.exp(logprobs.mean()))
    accepted = trajectory.reward.components[COMPONENT] > 0
    return Shown(confidence, accepted, bool(group.task.meta["stated"]))


@dataclasses.dataclass(frozen=True)
class Tab:
    """Metrics of a step's episodes:

    tab/shown: share that shows something; tab/shown_unknowable the same, where the wanted text
      cannot be known.
    tab/accepted: share that shows something that is accepted. tab/accept_rate: of those shown.
    tab/needless: share that shows something whose chance of acceptance is at most 1/4.
    """

    # The simulator, as in the reward.
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, groups: Sequence[Group], learner: Mapping[str, Any]) -> Mapping[str, float]:
        asked = Asked(**self.asked)
        pairs = [(group, one) for group in groups for one in group.trajectories]
        seen = [shown(group, one) for group, one in pairs]
        found = [one for one in seen if one is not None]
        open_ones = [
            one is not None
            for (group, _), one in zip(pairs, seen, strict=True)
            if not group.task.meta["stated"]
        ]
        needless = [
            one is not None and asked.chance(group.task, suggested(trajectory)) <= PAID.threshold
            for (group, trajectory), one in zip(pairs, seen, strict=True)
        ]
        metrics = {
            "tab/shown": len(found) / len(pairs),
            "tab/accepted": sum(one.accepted for one in found) / len(pairs),
            "tab/needless": float(np.mean(needless)),
        }
        if open_ones:
            metrics["tab/shown_unknowable"] = float(np.mean(open_ones))
        if found:
            metrics["tab/accept_rate"] = sum(one.accepted for one in found) / len(found)
        return metrics
