"""People in an A/B test, and what a look after every session sees.

A test has users with habits of their own, some of whom come much more often than others. Their
sessions come in random order. Everything is vectorised over the sessions of a test: what is known
after session i is a running sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float64, Int64


@dataclasses.dataclass(frozen=True)
class Metric:
    """Variation of a metric between users, and between the sessions of one."""

    name: str
    mean: float
    # Standard deviation of users' own means.
    between: float
    # Of one user's sessions around it; None for a 0/1 metric.
    within: float | None
    # Whether both are log-normal, with a long tail to the right.
    skewed: bool = False

    def users(
        self, rng: np.random.Generator, count: int, factor: float
    ) -> Float64[np.ndarray, " users"]:
        """Users' own means, around ``factor`` times the metric's."""
        mean = self.mean * factor
        if self.skewed:
            return _log_normal(rng, np.full(count, mean), self.between * factor)
        if self.within is None:  # a chance has a beta distribution
            size = mean * (1 - mean) / self.between**2 - 1
            return rng.beta(mean * size, (1 - mean) * size, count)
        return rng.normal(mean, self.between, count)

    def sessions(
        self, rng: np.random.Generator, means: Float64[np.ndarray, " sessions"]
    ) -> Float64[np.ndarray, " sessions"]:
        """A value for each session, around its user's mean."""
        if self.within is None:
            return (rng.random(means.size) < means).astype(np.float64)
        if self.skewed:
            return _log_normal(rng, means, self.within)
        return rng.normal(means, self.within)

    def deviation(self, sessions: int) -> float:
        """Standard deviation of the means of users who have so many sessions each."""
        within = self.within
        if within is None:
            within = np.sqrt(self.mean * (1 - self.mean) - self.between**2)
        return float(np.sqrt(self.between**2 + within**2 / sessions))


# Assumptions about people, not measurements: a chance of accepting with habits, a share that is
# kept, seconds with a long tail.
ACCEPTED = Metric("accepted", mean=0.3, between=0.1, within=None)
RETAINED = Metric("retained", mean=0.6, between=0.1, within=0.25)
LATENCY = Metric("latency", mean=0.8, between=0.4, within=1.0, skewed=True)
METRICS = (ACCEPTED, RETAINED, LATENCY)
# Of suggestions: 0.75 or -0.25, and a part for what is kept.
REWARD = Metric("reward", mean=0.1, between=0.1, within=0.45)


@dataclasses.dataclass(frozen=True)
class Stream:
    """One test, session by session."""

    user: Int64[np.ndarray, " sessions"]
    treated: Bool[np.ndarray, " sessions"]
    value: Float64[np.ndarray, " sessions"]


@dataclasses.dataclass(frozen=True)
class Running:
    """One arm of a test after each session: units so far, their mean, its squared standard error
    (nan below two units).
    """

    count: Float64[np.ndarray, " sessions"]
    mean: Float64[np.ndarray, " sessions"]
    variance: Float64[np.ndarray, " sessions"]


def streams(
    rng: np.random.Generator,
    metric: Metric,
    *,
    tests: int,
    users: int,
    sessions: int,
    share: float = 0.5,
    factor: float = 1.0,
) -> Iterator[Stream]:
    """Simulated tests. share: of users who get the candidate. factor: the candidate's mean over the
    other one's; 1 for an A/A test.
    """
    for _ in range(tests):
        activity = rng.gamma(0.7, size=users)
        user = rng.choice(users, sessions, p=activity / activity.sum())
        treated = rng.random(users) < share
        means = np.where(treated, metric.users(rng, users, factor), metric.users(rng, users, 1.0))
        yield Stream(user, treated[user], metric.sessions(rng, means[user]))


def by_session(stream: Stream) -> tuple[Running, Running]:
    """Control and treated arm if every session were a unit of its own."""
    ones = np.ones_like(stream.value)
    return _arms(stream, ones, stream.value, stream.value**2)


def by_user(stream: Stream) -> tuple[Running, Running]:
    """Control and treated arm with one number for each user: the mean of the sessions so far."""
    order = np.argsort(stream.user, kind="stable")
    value = stream.value[order]
    user = stream.user[order]
    first = np.concatenate(([True], user[1:] != user[:-1]))
    begins = np.flatnonzero(first)[np.cumsum(first) - 1]
    # the sum of a user's sessions up to this one: a running sum less what came before the user
    sums = np.cumsum(value)
    count = np.arange(value.size) - begins + 1
    mean = (sums - (sums[begins] - value[begins])) / count
    before = np.where(first, 0.0, np.concatenate(([0.0], mean[:-1])))
    # What this session changes in the number of users, in the sum of their means, of the squares.
    changes = first.astype(np.float64), mean - before, mean**2 - before**2
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    return _arms(stream, *(change[back] for change in changes))


def _arms(
    stream: Stream,
    units: Float64[np.ndarray, " sessions"],
    sums: Float64[np.ndarray, " sessions"],
    squares: Float64[np.ndarray, " sessions"],
) -> tuple[Running, Running]:
    arms = []
    for mine in (~stream.treated, stream.treated):
        count, total, square = (np.cumsum(np.where(mine, x, 0.0)) for x in (units, sums, squares))
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = total / count
            variance = np.maximum(square - total * mean, 0.0) / (count - 1) / count
        variance[count < 2] = np.nan
        arms.append(Running(count, mean, variance))
    return arms[0], arms[1]


def _log_normal(
    rng: np.random.Generator, mean: Float64[np.ndarray, " n"], deviation: float
) -> Float64[np.ndarray, " n"]:
    """Log-normal values with these means and this deviation relative to the mean of all."""
    sigma2 = np.log1p((deviation / mean.mean()) ** 2)
    return mean * rng.lognormal(-sigma2 / 2, np.sqrt(sigma2), mean.size)
