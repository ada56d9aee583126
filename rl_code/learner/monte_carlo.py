"""Credit of turns by Monte-Carlo values: the mean return of continuations from turn borders.

Implements VinePPO (2410.01679, section 4, equations 4 to 6): the value of a state is the mean
return of k continuations from it, and a step between two states is credited with the difference of
their values, plus its own reward. Departures:
- A state is a turn border (``types.Fork``). Turns between two borders that have values are credited
  together.
- The value of the prompt needs no continuations: it is the mean return of the other trajectories of
  the group, as in RLOO, which is unbiased too.
- Rewards come at the end of an episode, and are not discounted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl_code.learner.rounding import rounding_of
from rl_code.types import Fork, Group, Trajectory


@dataclasses.dataclass(frozen=True)
class Border:
    """A turn border of a trajectory, from which others went on."""

    # Its place.
    fork: Fork
    # Returns of the continuations, those that ended in a fault left out.
    returns: tuple[float, ...]
    # Number of these that solved the task.
    solved: int

    @property
    def value(self) -> float:
        """Mean return: an unbiased estimate of the value of the state."""
        return float(np.mean(self.returns))

    @property
    def share(self) -> float:
        """Share of the continuations that solved the task: the label of the turn before the border
        (Math-Shepherd, 2312.08935, equation 4: soft estimation).
        """
        return self.solved / len(self.returns)


def borders_of(group: Group, index: int) -> list[Border]:
    """Borders of trajectory ``index`` of which at least one continuation counts, in order."""
    found = []
    for fork, continuations in group.parted_from(index):
        counted = [one for one in continuations if one.status != "fault"]
        if counted:
            returns = tuple(one.reward.total for one in counted)
            found.append(Border(fork, returns, sum(one.solved for one in counted)))
    return found


def mean_reward(group: Group, without: int = -1) -> float | None:
    """Mean return of a group's trajectories, but for faults and one place; None for none."""
    rewards = [
        one.reward.total
        for place, one in enumerate(group.trajectories)
        if one.status != "fault" and place != without
    ]
    return float(np.mean(rewards)) if rewards else None


def segments_of(trajectory: Trajectory, borders: Sequence[Border]) -> np.ndarray:
    """int [n], for each sampled token the number of borders that it stands behind.

    A context of a sub-agent stands before a border if it was there when the border was reached.
    """
    parts = []
    for number, context in enumerate(trajectory.contexts):
        places = np.flatnonzero(context.sampled)
        behind = np.zeros(len(places), int)
        for border in borders:
            lengths = border.fork.lengths
            behind += places >= lengths[number] if number < len(lengths) else 1
        parts.append(behind)
    return np.concatenate(parts)


@dataclasses.dataclass(frozen=True)
class MonteCarlo:
    """V(border behind it) - V(border before it) for each token. It needs ``rollout.forks``.

    Trajectories without borders get what RLOO gives them: return minus the mean of the others.
    Turns before the first border get 0 where nothing tells the value of the prompt, since no other
    trajectory of the group counts.
    """

    def __call__(self, group: Group) -> list[float | np.ndarray]:
        return [self._credit(group, place) for place in range(len(group.trajectories))]

    def _credit(self, group: Group, place: int) -> float | np.ndarray:
        trajectory = group.trajectories[place]
        if trajectory.status == "fault":
            return 0.0
        borders = borders_of(group, trajectory.index)
        start = mean_reward(group, without=place)
        later = [*(border.value for border in borders), trajectory.reward.total]
        values = np.array([later[0] if start is None else start, *later], np.float64)
        steps = np.diff(values)
        # what differs by rounding alone is no signal
        steps = np.where(np.abs(steps) <= rounding_of(values), 0.0, steps).astype(np.float32)
        if not borders:
            return float(steps[0])
        return steps[segments_of(trajectory, borders)]
