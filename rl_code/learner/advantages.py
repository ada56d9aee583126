"""Group-relative advantages, on the host in numpy: rewards of P groups of G trajectories ->
advantages.

Implements GRPO (2402.03300), Dr.GRPO (2503.20783) and RLOO (2402.14740). Departures: the standard
deviation of GRPO is the population's; a trajectory that is not valid (a fault of the sandbox) is
left out of its group's statistics and gets 0; a group whose rewards are all equal gets exactly 0,
whatever rounding does to its mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float

from rl_code.types import Group


def grpo(
    rewards: Float[np.ndarray, "P G"], eps: float, valid: Bool[np.ndarray, "P G"] | None = None
) -> np.ndarray:
    """(R_i - mean) / (std + eps), float32 [P, G] (2402.03300, section 4.1.2)."""
    centred, _ = _centre(rewards, valid)
    count = _count(rewards, valid)
    std = np.sqrt(np.sum(np.square(centred), axis=1, keepdims=True) / count)
    return np.where(std > 0.0, centred / np.where(std > 0.0, std + eps, 1.0), 0.0).astype(
        np.float32
    )


def dr_grpo(
    rewards: Float[np.ndarray, "P G"], eps: float, valid: Bool[np.ndarray, "P G"] | None = None
) -> np.ndarray:
    """R_i - mean, float32 [P, G] (2503.20783, section 3.2). eps is not used."""
    del eps
    centred, _ = _centre(rewards, valid)
    return centred.astype(np.float32)


def rloo(
    rewards: Float[np.ndarray, "P G"], eps: float, valid: Bool[np.ndarray, "P G"] | None = None
) -> np.ndarray:
    """R_i minus the mean of the others, float32 [P, G] (2402.14740, section 3.3). eps is not
    used.
    """
    del eps
    centred, count = _centre(rewards, valid)
    return (centred * count / np.maximum(count - 1.0, 1.0)).astype(np.float32)


ADVANTAGES: dict[str, Callable[..., np.ndarray]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def group_advantages(groups: Sequence[Group], name: str, eps: float) -> list[np.ndarray]:
    """Advantages of finished groups, one float32 [G] each, from the rewards' totals; faults count
    for nothing.

    name: a key of ADVANTAGES. Groups may differ in size.

    Raises:
      ValueError: a reward is not finite (names task and index), or the name is unknown.
    """
    if name not in ADVANTAGES:
        raise ValueError(f"advantage {name!r} is not one of {sorted(ADVANTAGES)}")
    out = []
    for group in groups:
        rewards = np.array(
            [[trajectory.reward.total for trajectory in group.trajectories]], np.float64
        )
        if not np.isfinite(rewards).all():
            bad = int(np.flatnonzero(~np.isfinite(rewards[0]))[0])
            raise ValueError(
                f"task {group.task.id!r}: trajectory {bad} has reward {rewards[0, bad]}"
            )
        valid = np.array([[trajectory.status != "fault" for trajectory in group.trajectories]])
        out.append(ADVANTAGES[name](rewards, eps, valid)[0])
    return out


def _count(rewards: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """Valid trajectories of each group, float64 [P, 1], at least 1."""
    valid = np.ones(rewards.shape, bool) if valid is None else valid
    return np.maximum(valid.sum(axis=1, keepdims=True), 1).astype(np.float64)


def _centre(rewards: np.ndarray, valid: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Rewards minus their group's mean (0 where not valid or where all are equal), and the count,
    both float64.
    """
    rewards = np.asarray(rewards, np.float64)
    valid = np.ones(rewards.shape, bool) if valid is None else valid
    count = _count(rewards, valid)
    mean = np.sum(np.where(valid, rewards, 0.0), axis=1, keepdims=True) / count
    top = np.max(np.where(valid, rewards, -np.inf), axis=1, keepdims=True)
    bottom = np.min(np.where(valid, rewards, np.inf), axis=1, keepdims=True)
    return np.where(valid & (top > bottom), rewards - mean, 0.0), count
