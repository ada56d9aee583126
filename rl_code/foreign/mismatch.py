"""Log-probabilities of the sampler and of the trainer, token by token, where both are on record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from rl_code.types import Group, Trajectory


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Log-probabilities of tokens that have both."""

    # int32 [T], the tokens.
    tokens: np.ndarray
    # int64 [T], the place of each among the tokens of its trajectory.
    places: np.ndarray
    # float64 [T], the sampler's and the trainer's.
    sampler: np.ndarray
    trainer: np.ndarray

    @property
    def log_ratio(self) -> np.ndarray:
        """float64 [T], the trainer's less the sampler's."""
        return self.trainer - self.sampler

    def numbers(self) -> dict[str, float]:
        """Numbers of a step by the names of metrics; empty without a token."""
        if not len(self.tokens):
            return {}
        ratio = self.log_ratio
        near = np.clip(ratio, -20.0, 20.0)
        return {
            "policy/mismatch_mean": float(np.mean(np.abs(ratio))),
            "policy/mismatch_max": float(np.max(np.abs(ratio))),
            "policy/mismatch_k1": float(np.mean(-near)),
            "policy/mismatch_k3": float(np.mean(np.expm1(near) - near)),
        }


def of_trajectory(trajectory: Trajectory) -> Mismatch:
    """The tokens of a trajectory that have both."""
    trainer = trajectory.trainer_logprobs
    if trainer is None:
        return joined([])
    both = trajectory.sampled & np.isfinite(trainer) & np.isfinite(trajectory.logprobs)
    chosen = np.flatnonzero(both)
    sampler = trajectory.logprobs[chosen].astype(np.float64)
    return Mismatch(trajectory.tokens[chosen], chosen, sampler, trainer[chosen].astype(np.float64))


def of_groups(groups: Iterable[Group]) -> Mismatch:
    """The tokens of groups that have both."""
    return joined([of_trajectory(one) for group in groups for one in group.trajectories])


def joined(parts: Sequence[Mismatch]) -> Mismatch:
    """The tokens of several, one after another."""
    kinds = {"tokens": np.int32, "places": np.int64, "sampler": float, "trainer": float}
    return Mismatch(
        **{
            name: np.concatenate(
                [np.zeros(0, kind), *(getattr(part, name) for part in parts)]
            ).astype(kind)
            for name, kind in kinds.items()
        }
    )


def by_token(found: Mismatch) -> list[tuple[int, int, float, float]]:
    """(token, how often, mean |difference|, greatest |difference|), the token that adds most to the
    sum first.
    """
    kinds, at, counts = np.unique(found.tokens, return_inverse=True, return_counts=True)
    size = np.abs(found.log_ratio)
    sums = np.bincount(at, size, len(kinds))
    most = np.zeros(len(kinds))
    np.maximum.at(most, at, size)
    order = np.argsort(-sums, kind="stable")
    return [
        (int(kinds[i]), int(counts[i]), float(sums[i] / counts[i]), float(most[i])) for i in order
    ]
