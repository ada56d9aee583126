"""Differences of two samples whose values come in pairs, beside what they would be without pairs.

Two runs that start from one recorded step and draw the same random numbers differ only by what was
changed. What made one seed or one task easy for both cancels in the difference. The paired interval
is Student's t on the differences, the unpaired one is Welch's (1947), which takes the two samples
for independent. The ratio of the two variances says how many times more runs the unpaired
comparison would need for an interval as narrow.

That ratio is (1 + q) / 2, where q is the variance of the sums of the pairs over that of their
differences. Sums and differences are independent if both samples are normal with one variance
(Pitman 1939, Biometrika 31), so q over its true value has an F distribution. The ratio's interval
follows from it, and says how little a few pairs tell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy  # reads scipy.stats when it is first used, which takes most of a second

from rl_code.evaluation.passk import LEVEL, Interval


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """The mean of second minus first."""

    pairs: int
    # With the pairs taken into account, and as if the samples were independent.
    paired: Interval
    unpaired: Interval
    # Variance of the difference of independent samples over that of the paired one; infinite where
    # all pairs differ by the same.
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
    """The variance ratio and its interval; 1 where nothing varies at all."""
    sums = (one + other).var(ddof=1)
    differences = (other - one).var(ddof=1)
    if not differences:
        ratio = math.inf if sums else 1.0
        return Interval(ratio, ratio, ratio)
    quotient = sums / differences
    freedom = one.size - 1
    most = scipy.stats.f.ppf((1 + LEVEL) / 2, freedom, freedom)
    low, high = quotient / most, quotient * most
    return Interval(*(float((1 + q) / 2) for q in (quotient, low, high)))
