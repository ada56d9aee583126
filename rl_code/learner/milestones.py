"""Credit for milestones: potential-based shaping (Ng, Harada and Russell, ICML 1999), by turn.

Let Phi(s_t) be the share of milestones that the work has reached before turn t
(``environment.milestones``). Turn t earns F_t = gamma Phi(s_{t+1}) - Phi(s_t), and is credited with

    sum over k >= t of (gamma carry)^(k - t) F_k

beside the advantage of the whole trajectory. This is generalised advantage estimation (1506.02438)
with the potential in the place of a value function:

- ``carry=0`` credits a turn with the milestones that it reached, and debits it for those that it
  lost. It helps most where success is rare. A policy that maximises it may differ from the best.
- ``carry=1, ends_at_zero=True`` has the sum -Phi(s_t), whatever happens from turn t on: a baseline,
  which leaves every expected gradient and so the optimal policy as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl_code.config import named
from rl_code.config.named import Named
from rl_code.learner.advantages import ADVANTAGES, Credit, per_turn, reads_values
from rl_code.types import Group, Trajectory


@dataclasses.dataclass(frozen=True)
class Milestones:
    """The advantage of the outcome, and for each turn the milestones that it reached."""

    # The advantage of the whole trajectory: another member of ADVANTAGES.
    outcome: Named = Named("grpo")
    # What all milestones together are worth beside the advantage of the outcome.
    weight: float = 0.5
    # The discount of a turn.
    gamma: float = 1.0
    # Share of its credit that a turn passes on to the turn before it.
    carry: float = 0.0
    # True if the state after the last turn counts as one without milestones, so that no episode
    # earns anything by them in total. False for the milestones that it has reached.
    ends_at_zero: bool = False

    def __post_init__(self):
        if not 0.0 <= self.weight < np.inf:
            raise ValueError(f"weight={self.weight} must be at least 0 and finite")
        if not (0.0 < self.gamma <= 1.0 and 0.0 <= self.carry <= 1.0):
            raise ValueError(f"gamma={self.gamma} must be in (0, 1], carry={self.carry} in [0, 1]")
        if self.outcome.name == "milestones":
            raise ValueError("outcome='milestones' must be another advantage")
        if reads_values(self._member):  # a wrong name is an error of the config
            raise ValueError(
                f"outcome={self.outcome.name!r} is made of values, which are not here yet when "
                "milestones are credited; take another advantage, such as 'grpo'"
            )

    @property
    def _member(self):
        return named.make(ADVANTAGES, self.outcome, "config.train.advantage.outcome")

    def __call__(self, group: Group) -> list[Credit]:
        """Raises ValueError for a trajectory without milestones."""
        outcomes = self._member(group)
        return [
            outcome if t.status == "fault" else (outcome + self._of_tokens(t)).astype(np.float32)
            for outcome, t in zip(outcomes, group.trajectories, strict=True)
        ]

    def _of_tokens(self, trajectory: Trajectory) -> np.ndarray:
        """Credit for milestones of each sampled token of a trajectory."""
        if trajectory.milestones is None:
            raise ValueError(
                f"task {trajectory.task_id!r} trajectory {trajectory.index} has no milestones; set "
                "config.milestones, or take another train.advantage"
            )
        credit = credit_of(trajectory.milestones, self.gamma, self.carry, self.ends_at_zero)
        return self.weight * per_turn(trajectory, credit.tolist())


def credit_of(
    potentials: Sequence[float], gamma: float, carry: float, ends_at_zero: bool
) -> np.ndarray:
    """float64 [n]: the credit of each of n turns.

    potentials: [n + 1], before the first turn and after each.
    """
    phi = np.array(potentials, np.float64)
    if ends_at_zero:
        phi[-1] = 0.0
    credit = gamma * phi[1:] - phi[:-1]
    for turn in reversed(range(len(credit) - 1)):
        credit[turn] += gamma * carry * credit[turn + 1]
    return credit
