"""Errors of values at turn borders, against the mean return of continuations from there.

The mean of n returns has an error of its own, of variance s^2 / n with s^2 the sample variance of
the returns. So the squared error of V is that against the mean less s^2 / n, and the squared error
of an estimate from k continuations is s^2 / k: both are unbiased, whatever n is. Values and returns
are not discounted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl_code.learner.monte_carlo import borders_of, segments_of
from rl_code.types import Group

# Continuations by which values are estimated, of those that a border has.
COUNTS = (1, 2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Judged:
    """The value of a border, and what went on from there."""

    value: float
    # Two of them or more.
    returns: tuple[float, ...]


def judged(group: Group, values: Sequence[np.ndarray]) -> list[Judged]:
    """The borders of a group with two continuations or more.

    values: of each trajectory, before each of its sampled tokens; empty where they are not known.
    V is that before the first token behind the border.
    """
    found = []
    for trajectory, own in zip(group.trajectories, values, strict=True):
        if not len(own) or not trajectory.contexts:
            continue
        borders = borders_of(group, trajectory.index)
        # of the episode's own context, whose tokens come first
        count = int(trajectory.contexts[0].sampled.sum())
        behind = segments_of(trajectory, borders)[:count]
        for number, border in enumerate(borders, start=1):
            after = np.flatnonzero(behind >= number)
            if len(after) and len(border.returns) > 1:
                found.append(Judged(float(own[after[0]]), border.returns))
    return found


def error_metrics(borders: Sequence[Judged]) -> dict[str, float]:
    """Root mean squared errors over borders; {} for none.

    value/border_error: of V. value/border_error_constant: of the best constant, which is how far
    the borders differ. value/border_error_of_K: of the mean of K continuations.
    """
    if not borders:
        return {}
    values = np.array([border.value for border in borders])
    means = np.array([np.mean(border.returns) for border in borders])
    variances = np.array([np.var(border.returns, ddof=1) for border in borders])
    counts = np.array([len(border.returns) for border in borders])
    noise = float(np.mean(variances / counts))
    # a sum that is below 0 is 0 within its error
    squares = {
        "value/border_error": np.mean(np.square(values - means)) - noise,
        "value/border_error_constant": np.var(means) - noise,
    }
    for count in COUNTS:
        if count <= counts.max():
            squares[f"value/border_error_of_{count}"] = np.mean(variances) / count
    errors = {name: float(np.sqrt(max(square, 0.0))) for name, square in squares.items()}
    return {"value/borders": float(len(borders)), **errors}
