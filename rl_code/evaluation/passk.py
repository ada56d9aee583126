"""pass@k without bias, and its mean over tasks with a bootstrap interval.

Implements the estimator 1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374, eq. 1) with
whole numbers, so that nothing overflows or cancels, and the percentile bootstrap over tasks (Efron
1979). The samples of one task are not resampled. The interval therefore says how the result would
vary with other tasks of the same kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy  # reads scipy.stats when it is first used, which takes most of a second
from jaxtyping import Float64

RESAMPLES = 10_000
LEVEL = 0.95

_INDICES_AT_ONCE = 4_000_000  # of the bootstrap: bounds its memory to about 64 MB


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate and the interval around it."""

    mean: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples drawn from n without replacement is correct, when
    c of the n are.

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got {n=}, {c=}, {k=}")
    failures = math.comb(n - c, k)
    draws = math.comb(n, k)
    return (draws - failures) / draws


def mean_interval(
    values: Sequence[float] | Float64[np.ndarray, " tasks"], *, seed: int = 0
) -> Interval:
    """Mean over tasks with its 95 % percentile-bootstrap interval.

    Where every task has the same value the interval has no width: the tasks at hand say nothing
    about others.

    Args:
      values: one number per task.

    Raises ValueError when there are no values or one is not finite.
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise ValueError(f"expected at least one finite value per task, got {array!r}")
    mean = float(array.mean())
    if array.size == 1:  # which scipy refuses: there is nothing to resample
        return Interval(mean, mean, mean)
    found = scipy.stats.bootstrap(
        (array,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        batch=max(1, _INDICES_AT_ONCE // array.size),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(mean, float(found.low), float(found.high))
