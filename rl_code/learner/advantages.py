"""Credit: from the rewards of a group to the advantage of every sampled token, on the host in
numpy.

Implements GRPO (2402.03300), Dr.GRPO (2503.20783), RLOO (2402.14740), PKPO (2505.15201) and MaxRL
(2602.02710), which give each trajectory one number. Departures:
- The standard deviation of GRPO is that of the population.
- A trajectory that is not valid (a fault of the sandbox) is left out of its group's statistics, and
  its advantage is 0.
- If all rewards of a group are equal but for rounding, its advantages are exactly 0.
- Weights of PKPO are those of a sum over trajectories. Here they are G times as large, since losses
  are means over trajectories: with k = 1 they would be the rewards themselves.
- MaxRL divides by the share of solved trajectories. For rewards of 0 and 1 that is their mean.

A member of ADVANTAGES is called with one group and may also credit turns (``per_turn``) or single
tokens. Credit of turns by what goes on from their ends is in ``monte_carlo``, and by what is paid
at each of them in ``process_credit``.
tokens. One that has ``reads_values = True`` is called with the values of the group's trajectories
and the section ``train.value`` too (``gae.GAE``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float

from rl_code.learner.rounding import differ
from rl_code.types import Group, Trajectory

# What a trajectory is credited with: one number for all its sampled tokens, or float [n], one for
# each of its n sampled tokens in the order of ``Trajectory.tokens[Trajectory.sampled]``.
Credit = float | np.ndarray


class Advantage(Protocol):
    """A frozen dataclass whose fields are its settings, or a function."""

    def __call__(self, group: Group) -> Sequence[Credit]:
        """The credit of each trajectory, in order. That of faults is replaced by 0 afterwards."""


@dataclasses.dataclass(frozen=True)
class GRPO:
    """(R_i - mean) / (std + eps) (2402.03300, section 4.1.2)."""

    # Added to the standard deviation, so that almost equal rewards give no huge advantages. With 0
    # the advantages of every group whose rewards differ have the standard deviation 1.
    eps: float = 1e-4

    def __post_init__(self):
        if not 0.0 <= self.eps < np.inf:
            raise ValueError(f"eps={self.eps} must be at least 0 and finite")

    def __call__(self, group: Group) -> np.ndarray:
        centred, count = _centre(*rewards_of(group))
        std = np.sqrt(np.sum(np.square(centred)) / count)
        divisor = std + self.eps if std > 0.0 else 1.0
        return (centred / divisor).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class DrGRPO:
    """R_i - mean (2503.20783, section 3.2)."""

    def __call__(self, group: Group) -> np.ndarray:
        centred, _ = _centre(*rewards_of(group))
        return centred.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class RLOO:
    """R_i minus the mean of the others (2402.14740, section 3.3)."""

    def __call__(self, group: Group) -> np.ndarray:
        centred, count = _centre(*rewards_of(group))
        return (centred * count / max(count - 1.0, 1.0)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class PKPO:
    """Weights whose gradient is that of the expected best reward of k attempts, without bias
    (2505.15201, the estimator with the baseline "leave one out minus one"):

        A_i = k * mean over all sets of k - 1 others of max(R_i - max of the set, 0).

    A trajectory is credited with what it adds to the best of a set. So no advantage is below 0, and
    where most solve a task a solution is worth little. A group of fewer than k trajectories that
    count is weighted as with k = their number.
    """

    # Attempts of which the best one counts. With 1 the method would be "rloo".
    k: int = 4

    def __post_init__(self):
        if self.k < 2:
            raise ValueError(f"k={self.k} must be at least 2; the advantage for k=1 is 'rloo'")

    def __call__(self, group: Group) -> np.ndarray:
        rewards, valid = rewards_of(group)
        out = np.zeros(len(rewards), np.float32)
        places = np.flatnonzero(valid)
        if not differ(rewards[valid]):
            return out
        k = min(self.k, len(places))
        # The j-th smallest of n - 1 others is the best of C(j - 1, k - 2) of the sets of k - 1.
        others = len(places) - 1
        shares = [math.comb(j, k - 2) / math.comb(others, k - 1) for j in range(others)]
        for at in places:
            rest = np.sort(rewards[places[places != at]])
            out[at] = k * np.dot(shares, np.maximum(rewards[at] - rest, 0.0))
        return out


@dataclasses.dataclass(frozen=True)
class MaxRL:
    """(R_i - mean) / share of the group that solved the task (2602.02710).

    With rewards of 0 and 1 and G trajectories, the expected gradient is that of the sum over
    k = 1..G-1 of pass@k / k. (The paper's sum ends with k = G; its baseline takes the last term,
    since a group without a solution is credited with 0.) In the limit of large groups that is the
    gradient of log pass@1. Where rewards of failures differ, a group without a solution is scaled
    as if it had one.
    """

    def __call__(self, group: Group) -> np.ndarray:
        rewards, valid = rewards_of(group)
        centred, count = _centre(rewards, valid)
        solved = sum(group.trajectories[at].solved for at in np.flatnonzero(valid))
        return (centred * count / max(solved, 1)).astype(np.float32)


# One with a file of its own is imported when a config names it.
ADVANTAGES: dict[str, Any] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "rloo": RLOO,
    "pkpo": PKPO,
    "maxrl": MaxRL,
    "gae": "rl_code.learner.gae:GAE",
    "monte_carlo": "rl_code.learner.monte_carlo:MonteCarlo",
    "process": "rl_code.learner.process_credit:ProcessCredit",
    "milestones": "rl_code.learner.milestones:Milestones",
}


def reads_values(advantage: Any) -> bool:
    """True if a member makes advantages of values."""
    return getattr(advantage, "reads_values", False)


def rewards_of(group: Group) -> tuple[Float[np.ndarray, " G"], Bool[np.ndarray, " G"]]:
    """Rewards of a group's trajectories, float64, and which of them count (all but faults)."""
    rewards = np.array([trajectory.reward.total for trajectory in group.trajectories], np.float64)
    valid = np.array([trajectory.status != "fault" for trajectory in group.trajectories], bool)
    return rewards, valid


def per_turn(trajectory: Trajectory, values: Sequence[float]) -> np.ndarray:
    """Values of the assistant's turns, in order, as one float32 for each sampled token.

    Raises:
      ValueError: another number of values than of assistant turns, or a sampled token in no turn of
        the assistant's; names task and index.
    """
    name = f"task {trajectory.task_id!r} trajectory {trajectory.index}"
    turns = [turn for turn in trajectory.turns if turn.role == "assistant"]
    if len(values) != len(turns):
        raise ValueError(f"{name}: {len(values)} values for {len(turns)} turns of the assistant")
    spread = [np.full(len(context.tokens), np.nan, np.float32) for context in trajectory.contexts]
    for turn, value in zip(turns, values, strict=True):
        spread[turn.context][turn.start : turn.end] = value
    out = np.concatenate(spread)[trajectory.sampled]
    if len(turns) and np.isnan(out).any() and not np.isnan(values).any():
        raise ValueError(f"{name}: a sampled token is in no turn of the assistant's")
    return out


def group_advantages(groups: Sequence[Group], advantage: Advantage) -> list[list[Credit]]:
    """The credit of every trajectory by group; that of faults is 0, they count for nothing.

    Raises:
      ValueError: a reward or an advantage is not finite, or the member returned another number of
        values than there are trajectories or sampled tokens; names task and index.
    """
    return [credits_of(group, advantage) for group in groups]


def credits_of(group: Group, advantage: Advantage, *more: Any) -> list[Credit]:
    """``group_advantages`` of one group. more: what the member is called with beside it, as one
    that ``reads_values`` is.
    """
    rewards, valid = rewards_of(group)
    if not np.isfinite(rewards).all():
        bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise ValueError(f"task {group.task.id!r}: trajectory {bad} has reward {rewards[bad]}")
    values = list(advantage(group, *more))
    if len(values) != len(group.trajectories):
        raise ValueError(
            f"task {group.task.id!r}: {advantage} returned {len(values)} advantages for "
            f"{len(group.trajectories)} trajectories"
        )
    return [value if counts else 0.0 for value, counts in zip(values, valid, strict=True)]


def informative(group: Group, advantage: Advantage) -> bool:
    """True if an advantage of the group is not 0. Raises ValueError as ``group_advantages``."""
    (values,) = group_advantages([group], advantage)
    return any(np.any(value) for value in values)


def _centre(
    rewards: Float[np.ndarray, " G"], valid: Bool[np.ndarray, " G"]
) -> tuple[Float[np.ndarray, " G"], float]:
    """Rewards minus the mean of the valid ones, and the number of valid ones, at least 1.

    The difference is 0 for a reward that is not valid, and for all if the valid ones are equal but
    for rounding.
    """
    count = float(max(valid.sum(), 1))
    mean = np.sum(np.where(valid, rewards, 0.0)) / count
    return np.where(valid & differ(rewards[valid]), rewards - mean, 0.0), count
