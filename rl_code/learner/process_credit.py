"""Credit of turns by what a signal pays at each of them (``rewards.process``).

Implements process supervision of GRPO (2402.03300, section 4.1.3): the amounts of all turns of a
group are normalised by their mean and standard deviation, and a token is credited with the sum of
those of its turn and of all later ones. Departures:
- The rest of the reward, which comes at the end, is normalised by itself, as by GRPO or, without
  ``scale``, Dr.GRPO, and added. So an outcome and a process can be paid together.
- Tokens of sub-agents get what the first turn gets: they may belong to any.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from rl_code.learner.rounding import differ
from rl_code.types import Group, Trajectory


@dataclasses.dataclass(frozen=True)
class ProcessCredit:
    """Normalised amounts of this and all later turns, and the normalised rest of the reward."""

    # The component of the reward whose notes say what is paid at each turn.
    component: str = "process"
    # Weight of the process beside the rest of the reward. The component itself is left out of the
    # rest, so its own weight in ``reward.signals`` does not matter here.
    weight: float = 1.0
    # Whether amounts and rests are divided by their standard deviation, or only centred.
    scale: bool = True
    # Added to the standard deviation, as in GRPO.
    eps: float = 1e-4

    def __post_init__(self):
        for name in ("weight", "eps"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and finite")

    def __call__(self, group: Group) -> list[float | np.ndarray]:
        valid = np.array([one.status != "fault" for one in group.trajectories], bool)
        amounts = [amounts_of(one, self.component) for one in group.trajectories]
        counted = np.concatenate(
            [x for x, counts in zip(amounts, valid, strict=True) if counts] or [np.zeros(0)]
        )
        rests = np.array(
            [
                one.reward.total - one.reward.components.get(self.component, 0.0)
                for one in group.trajectories
            ],
            np.float64,
        )
        rests = self._normalised(rests, rests[valid])
        credits: list[float | np.ndarray] = []
        for one, own, rest, counts in zip(group.trajectories, amounts, rests, valid, strict=True):
            if not counts or not len(own):
                credits.append(float(rest) if counts else 0.0)
                continue
            steps = self.weight * self._normalised(own, counted)
            # of this turn and all later ones
            onward = np.cumsum(steps[::-1])[::-1] + rest
            credits.append(spread(one, onward))
        return credits

    def _normalised(self, values: np.ndarray, among: np.ndarray) -> np.ndarray:
        """Values less the mean of those that count; 0 where these are equal but for rounding."""
        if not differ(among):
            return np.zeros(len(values))
        centred = values - np.mean(among)
        return centred / (np.std(among) + self.eps) if self.scale else centred


def amounts_of(trajectory: Trajectory, component: str) -> np.ndarray:
    """float64 [turns of the first context], what a component pays at each; empty for nothing.

    Raises:
      ValueError: its notes have another number of amounts than there are turns; names the task.
    """
    notes = (trajectory.reward.notes or {}).get(component, {})
    amounts = np.array(notes.get("turns", ()), np.float64)
    turns = sum(turn.role == "assistant" and turn.context == 0 for turn in trajectory.turns)
    if len(amounts) not in (0, turns):
        raise ValueError(
            f"task {trajectory.task_id!r} trajectory {trajectory.index}: {component!r} pays "
            f"{len(amounts)} amounts for {turns} turns"
        )
    return amounts


def spread(trajectory: Trajectory, values: np.ndarray) -> np.ndarray:
    """float32, one value for each sampled token, from one for each turn of the first context."""
    own = np.full(len(trajectory.contexts[0].tokens), values[0], np.float32)
    turns = [turn for turn in trajectory.turns if turn.role == "assistant" and turn.context == 0]
    for turn, value in zip(turns, values, strict=True):
        own[turn.start : turn.end] = value
    others = sum(int(context.sampled.sum()) for context in trajectory.contexts[1:])
    found = own[trajectory.contexts[0].sampled]
    return np.concatenate([found, np.full(others, values[0], np.float32)])
