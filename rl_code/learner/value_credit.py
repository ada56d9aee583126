"""From the values of a batch to its advantages and to what the value function learns from it, on
the host in numpy; and how good the values were.

Explained variance is 1 - Var(G - V) / Var(G) over sampled tokens, with G the return. A constant has
0, and less than 0 is worse than a constant. V is that before the value function has seen the
tokens. G is the return also where the targets have a lambda below 1, since these contain V.

Dimensions: R rows, M targets of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from rl_code.learner.advantages import credits_of, per_turn, reads_values
from rl_code.learner.batch import Batch
from rl_code.learner.border_values import Judged, error_metrics, judged
from rl_code.learner.gae import of_trajectory
from rl_code.learner.value_config import ValueConfig
from rl_code.types import Group, Trajectory

# The first turn, and the first distance to the last sampled token of the context, of the parts by
# which explained variance is told apart.
TURNS = (1, 2, 3, 4, 5, 9, 17)
DISTANCES = (0, 16, 64, 256, 1024, 4096)


def with_values(
    batch: Batch,
    groups: Sequence[Group],
    values: Float[np.ndarray, "R M"],
    advantage: Any,
    config: ValueConfig,
) -> tuple[Batch, dict[str, float]]:
    """A batch of numpy arrays with its values and returns, and with advantages where these are made
    of values; and metrics of the values.

    groups: those that the batch was packed from, in order. values: before each target.
    """
    places = _places(batch)
    number = 0
    returns = np.zeros(values.shape, np.float32)
    advantages = np.array(batch.advantages)
    seen: list[_Seen] = []
    borders: list[Judged] = []
    for group in groups:
        size = len(group.trajectories)
        at = [places.get(n, np.zeros(0, int)) for n in range(number, number + size)]
        own = [values.flat[where] for where in at]
        number += size
        if group.continuations and config.gamma == 1.0:
            borders += judged(group, own)
        for trajectory, where, before in zip(group.trajectories, at, own, strict=True):
            if not len(where):
                continue
            whole = before.astype(np.float64)
            ahead = of_trajectory(trajectory, before, config, lambda _: config.lam)
            returns.flat[where] = whole + ahead
            ahead = of_trajectory(trajectory, before, config, lambda _: 1.0)
            seen.append(_Seen.of(trajectory, whole, whole + ahead))
        if reads_values(advantage):
            for where, credit in zip(at, credits_of(group, advantage, own, config), strict=True):
                advantages.flat[where] = credit
    known = np.where(batch.mask > 0.0, values, 0.0).astype(np.float32)
    changed = dataclasses.replace(batch, advantages=advantages, values=known, returns=returns)
    return changed, _metrics(seen) | error_metrics(borders)


def _places(batch: Batch) -> dict[int, np.ndarray]:
    """By number of the trajectory, the flat indices of its targets in order."""
    flat = np.flatnonzero(batch.mask.reshape(-1) > 0.0)
    if not len(flat):
        return {}
    numbers = batch.trajectories.reshape(-1)[flat]
    # those of a trajectory are neighbours
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    parts = np.split(flat, starts[1:])
    return {int(numbers[start]): part for start, part in zip(starts, parts, strict=True)}


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Sampled tokens, in order, float64 or int [n] each."""

    values: np.ndarray
    returns: np.ndarray
    # The turn of the assistant, from 1; 0 where a trajectory tells no turns.
    turns: np.ndarray
    # Sampled tokens behind it in its context.
    distances: np.ndarray

    @classmethod
    def of(cls, trajectory: Trajectory, values: np.ndarray, returns: np.ndarray) -> _Seen:
        count = sum(turn.role == "assistant" for turn in trajectory.turns)
        turns = per_turn(trajectory, range(1, count + 1)) if count else np.zeros(len(values))
        distances = [np.arange(c.sampled.sum())[::-1] for c in trajectory.contexts]
        return cls(values, returns, turns.astype(int), np.concatenate(distances))


def _metrics(seen: Sequence[_Seen]) -> dict[str, float]:
    """Metrics of the values of a step. A part in which all returns are equal has no explained
    variance.
    """
    if not seen:
        return {}
    values, returns, turns, distances = (
        np.concatenate([getattr(one, field.name) for one in seen])
        for field in dataclasses.fields(_Seen)
    )
    found = {
        "value/mean": float(np.mean(values)),
        "value/return_mean": float(np.mean(returns)),
        "value/error": float(np.sqrt(np.mean(np.square(returns - values)))),
    }
    kinds = {"turn": (turns, TURNS), "to_end": (distances, DISTANCES)}
    parts = {"value/explained_variance": np.ones(len(values), bool)}
    for kind, (numbers, firsts) in kinds.items():
        for first, behind in zip(firsts, (*firsts[1:], np.inf), strict=True):
            last = "_on" if behind == np.inf else f"_{behind - 1}" if behind - 1 > first else ""
            name = f"value/explained_variance_{kind}_{first}{last}"
            parts[name] = (numbers >= first) & (numbers < behind)
    for name, part in parts.items():
        share = explained_variance(values[part], returns[part])
        if share is not None:
            found[name] = share
    return found


def explained_variance(
    values: Float[np.ndarray, " n"], returns: Float[np.ndarray, " n"]
) -> float | None:
    """1 - Var(G - V) / Var(G); None where the returns do not differ."""
    variance = float(np.var(returns)) if len(returns) else 0.0
    # rounding of float32 values, from which the returns are computed, is no variance
    if variance <= 1e-12 * max(1.0, float(np.max(np.abs(returns), initial=0.0)) ** 2):
        return None
    return 1.0 - float(np.var(returns - values)) / variance
