"""Differences of two samples whose values come in pairs, beside what they would be without pairs.

Two runs that start from one recorded step and draw the same random numbers differ only by what was
changed. What made one seed or one task easy for both cancels in the difference. The paired interval
is Student's t on the differences, the unpaired one is Welch's (1947), which takes the two samples
for independent. The ratio of the two variances says how many times more runs the unpaired
comparison would need for an interval as narrow. It is a ratio of estimates, which a few pairs leave
wide open, so it has an interval too: the percentile bootstrap (Efron 1979), in which whole pairs
are drawn again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy.stats

from rl_code.evaluation.passk import LEVEL, Interval

_RESAMPLES = 2_000


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """The mean of second minus first."""

    pairs: int
    # With the pairs taken into account, and as if the samples were independent.
    paired: Interval
    unpaired: Interval
    # Variance of the difference of independent samples over that of the paired one; infinite where
    # all pairs differ by the same. The interval is that of the bootstrap over pairs.
    variance_ratio: Interval


def paired_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Compares two samples, of which entry i of one belongs to entry i of the other.

    Raises ValueError for fewer than two pairs, samples of different lengths, or a value that is not
    finite.
    """
    one = np.asarray(first, np.float64)
    other = np.asarray(second, np.float64)
    if one.ndim != 1 or one.shape != other.shape or one.size < 2:
        raise ValueError(
            f"expected at least two pairs, got samples of shapes {one.shape} and {other.shape}"
        )
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise ValueError(f"expected finite values, got {first!r} and {second!r}")
    count = one.size
    differences = other - one
    mean = float(differences.mean())
    # Squared standard errors of the two means, and of the mean difference.
    apart = one.var(ddof=1) / count, other.var(ddof=1) / count
    together = differences.var(ddof=1) / count
    # Welch's degrees of freedom for two samples of one size.
    squares = apart[0] ** 2 + apart[1] ** 2
    freedom = (count - 1) * sum(apart) ** 2 / squares if squares else 1.0
    return PairedDifference(
        pairs=count,
        paired=_interval(mean, together, count - 1),
        unpaired=_interval(mean, sum(apart), freedom),
        variance_ratio=_ratio_interval(one, other),
    )


def _interval(mean: float, variance: float, freedom: float) -> Interval:
    """The interval of Student's t around a mean with this squared standard error; no width where
    nothing varies.
    """
    if not variance:
        return Interval(mean, mean, mean)
    low, high = scipy.stats.t.interval(LEVEL, freedom, mean, math.sqrt(variance))
    return Interval(mean, float(low), float(high))


def _ratio_interval(one: np.ndarray, other: np.ndarray) -> Interval:
    """The variance ratio and its bootstrap interval; the same pairs give the same interval."""
    drawn = np.random.default_rng(0).integers(0, one.size, (_RESAMPLES, one.size))
    again = _ratios(one[drawn], other[drawn])
    # The method "nearest" gives one of the values: between two that are infinite nothing can be
    # interpolated.
    low, high = np.quantile(again, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest")
    return Interval(float(_ratios(one, other)), float(low), float(high))


def _ratios(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The variance ratio of samples along the last axis; 1 where nothing varies at all."""
    apart = one.var(-1, ddof=1) + other.var(-1, ddof=1)
    together = (other - one).var(-1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(together > 0, apart / together, np.where(apart > 0, np.inf, 1.0))
