"""Confidence sequences on a difference of means: intervals that hold at all times at once.

An A/B test that is looked at after every session, and stopped when it looks good, is wrong far more
often than its level says. The intervals here hold simultaneously at every look, so a look costs
nothing. They are the mixture sequential probability ratio test (mSPRT) of Johari, Pekelis and Walsh
(2015, arXiv 1512.04922) with a normal mixture over the effect, which is also the asymptotic
confidence sequence of Waudby-Smith et al. (2021, arXiv 2103.06476, theorem 2.2) with their rho
written as a multiple of the standard error. The one-sided sequence mixes over a half-normal.

With the estimate D of a difference, its squared standard error 1/I (I is the information) and a
prior N(0, scale^2) on the difference, the likelihood ratio against "no difference" is

    (1 + scale^2 I)^(-1/2) exp(scale^2 I^2 D^2 / (2 (1 + scale^2 I))),

a martingale if there is none. It exceeds 1 / alpha at any time with probability alpha at most
(Ville), so the interval is the set of differences at which it does not.

The unit is the user: sessions of one person resemble each other, so each user enters with one
number, the mean of their sessions. Two departures from the papers. They take observations that come
once and stay; here a user's mean moves while they come back. Second, variances are estimated, so
the guarantee is asymptotic in the number of users, and there is no interval before ``least_users``
users are in each arm. ``python -m experiments.ab`` measures what both cost: the share of A/A tests
that reject.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy  # reads scipy.special when it is first used
from jaxtyping import Float64, Int, Num

from rl_code.evaluation.passk import Interval

# With fewer users than this in an arm a mean is not close to normal.
LEAST_USERS = 30
_NEWTON_STEPS = 40


@dataclasses.dataclass(frozen=True)
class Arm:
    """Statistics of the users of one arm."""

    users: int
    # Mean over users of their means, and the squared standard error of it; nan without users, and
    # without two.
    mean: float
    variance: float


def arm(
    users: Int[np.ndarray, " sessions"] | np.ndarray, values: Num[np.ndarray, " sessions"]
) -> Arm:
    """One number for each user, then their mean.

    users: whose session it was; any values that can be compared. values: the metric of each
    session; nan for a session that does not have it, which is left out.

    Raises ValueError for arrays of different lengths or infinite values.
    """
    users = np.asarray(users)
    values = np.asarray(values, np.float64)
    if users.ndim != 1 or users.shape != values.shape:
        raise ValueError(f"expected one user per value, got shapes {users.shape}, {values.shape}")
    if np.isinf(values).any():
        raise ValueError("expected finite values or nan, got an infinite one")
    known = ~np.isnan(values)
    _, index = np.unique(users[known], return_inverse=True)
    count = int(index.max()) + 1 if index.size else 0
    if not count:
        return Arm(0, math.nan, math.nan)
    means = np.bincount(index, values[known]) / np.bincount(index)
    variance = float(means.var(ddof=1)) / count if count > 1 else math.nan
    return Arm(count, float(means.mean()), variance)


def difference(
    control: Arm, treated: Arm, *, scale: float, alpha: float = 0.05, least_users: int = LEAST_USERS
) -> Interval:
    """The two-sided confidence sequence of treated minus control, as it stands now.

    scale: size of the differences that matter, in units of the metric. The interval is tightest
      around there; any positive value keeps the level. alpha: the probability that the true
      difference is outside at any look at all.

    Returns an interval without ends, (-inf, inf), while an arm has fewer than ``least_users``
    users; its mean is nan while an arm has none. Raises ValueError for a scale or level that is
    none.
    """
    _check(scale, alpha)
    mean = treated.mean - control.mean
    if min(control.users, treated.users) < max(2, least_users):
        return Interval(mean, -math.inf, math.inf)
    width = float(radius(np.float64(control.variance + treated.variance), scale, alpha))
    return Interval(mean, mean - width, mean + width)


def bound(
    control: Arm, treated: Arm, *, scale: float, alpha: float = 0.05, least_users: int = LEAST_USERS
) -> float:
    """A lower bound of treated minus control that holds at all times at once, with 1 - alpha.

    A guardrail is crossed when the bound of its harm is above the harm that is allowed. Arguments
    and errors as of ``difference``; -inf while an arm has too few users.
    """
    _check(scale, alpha)
    if min(control.users, treated.users) < max(2, least_users):
        return -math.inf
    variance = np.float64(control.variance + treated.variance)
    return treated.mean - control.mean - float(radius_below(variance, scale, alpha))


def radius(
    variance: Float64[np.ndarray, " *looks"] | np.float64, scale: float, alpha: float
) -> Float64[np.ndarray, " *looks"]:
    """Half the width of the two-sided sequence.

    variance: squared standard error of the estimate, at least 0; where it is 0 so is the width.
    """
    prior = scale**2
    variance = np.asarray(variance, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = prior / variance  # scale^2 I
        inside = variance * (1 + 1 / ratio) * (2 * math.log(1 / alpha) + np.log1p(ratio))
    return np.where(variance > 0, np.sqrt(inside), 0.0)


def radius_below(
    variance: Float64[np.ndarray, " *looks"] | np.float64, scale: float, alpha: float
) -> Float64[np.ndarray, " *looks"]:
    """Distance of the one-sided lower bound below the estimate.

    The likelihood ratio with a half-normal over positive effects is twice the normal one times
    Phi(x), where x = scale I D / (1 + scale^2 I)^(1/2). Its logarithm grows with x, so the bound is
    the root of x^2 / 2 + log Phi(x) = log(1 / (2 alpha)) + log(1 + scale^2 I) / 2, found by Newton.
    """
    prior = scale**2
    variance = np.asarray(variance, np.float64)
    safe = np.where(variance > 0, variance, 1.0)
    level = math.log(1 / (2 * alpha)) + np.log1p(prior / safe) / 2
    # Above the root, from where Newton on a convex function descends to it: log Phi(x) > -log 2
    # for x > 0.
    x = np.sqrt(2 * np.maximum(level + math.log(2), 1e-12))
    for _ in range(_NEWTON_STEPS):
        log_phi = scipy.special.log_ndtr(x)
        slope = x + np.exp(-(x**2) / 2 - log_phi) / math.sqrt(2 * math.pi)
        step = (x**2 / 2 + log_phi - level) / slope
        x = x - step
        if np.all(np.abs(step) < 1e-12):
            break
    # D = x (1 + scale^2 I)^(1/2) / (scale I)
    return np.where(variance > 0, x * np.sqrt(1 + prior / safe) * safe / scale, 0.0)


def _check(scale: float, alpha: float) -> None:
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{scale=} must be a positive number, in units of the metric")
    if not 0 < alpha < 0.5:
        raise ValueError(f"{alpha=} must be between 0 and 0.5")
