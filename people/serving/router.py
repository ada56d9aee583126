"""Routers choose the arm that answers a user: fixed shares of users, or Thompson sampling."""

from __future__ import annotations

import collections
import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

# The alias that asks a server's router, and the experiment of those who are in none.
AUTO = "auto"
EVERYBODY = "everybody"
# Experiment of those who always have the same arm.
_CONTROL = "control"
# Sessions whose arm Thompson sampling remembers.
_SESSIONS = 100_000


def arm_of(user: str, experiment: str, shares: Mapping[str, float]) -> str:
    """The arm of a user: a hash of experiment and user, cut by the shares in their order.

    It needs no table, and stays the same as long as the shares do. Where the share of the last arm
    grows at the cost of the one before it, only users of these two arms move. Other experiments
    assign independently.

    user: a keyed hash already (``feedback.identity.user_key``). Raises ValueError for shares that
    are not positive or whose sum is not 1.
    """
    _check(shares)
    digest = hashlib.sha256(f"{len(experiment)} {experiment} {user}".encode()).digest()
    place = int.from_bytes(digest[:8]) / 2**64
    end = 0.0
    for arm, share in shares.items():
        end += share
        if place < end:
            return arm
    return arm  # the shares may sum up to a little less than 1


class Router(Protocol):
    """Chooses among arms, each a model by name and version. Safe to use from several threads."""

    @property
    def arms(self) -> Sequence[str]:
        """All that it may choose."""
        ...

    def choose(self, user: str, session: str) -> str:
        """The arm for a request."""
        ...

    def reward(self, arm: str, value: float, before: float | None = None) -> None:
        """An answer of an arm has earned this much. before: what was said of the same answer
        earlier, which this takes the place of; None for the first time.
        """
        ...

    def forget(self, user: str) -> None:
        """Forgets what is kept of a user."""
        ...


class Shares:
    """Every user has one arm of an experiment, by ``arm_of``. What is earned changes nothing."""

    def __init__(self, experiment: str, shares: Mapping[str, float]):
        _check(shares)
        self._experiment, self._shares = experiment, dict(shares)

    @property
    def arms(self) -> Sequence[str]:
        return tuple(self._shares)

    def choose(self, user: str, session: str) -> str:
        return arm_of(user, self._experiment, self._shares)

    def reward(self, arm: str, value: float, before: float | None = None) -> None:
        """Shares are fixed."""

    def forget(self, user: str) -> None:
        """Nothing is kept."""


class Controlled:
    """A share of users always has one arm, a copy that never changes; another router chooses for
    all others. The same users whatever the other router does.
    """

    def __init__(self, arm: str, share: float, others: Router):
        if not 0 < share < 1:
            raise ValueError(f"{share=} must be above 0 and below 1")
        self._arm, self._share, self._others = arm, share, others

    @property
    def arms(self) -> Sequence[str]:
        return tuple(dict.fromkeys([*self._others.arms, self._arm]))

    def choose(self, user: str, session: str) -> str:
        if arm_of(user, _CONTROL, {self._arm: self._share, "": 1 - self._share}):
            return self._arm
        return self._others.choose(user, session)

    def reward(self, arm: str, value: float, before: float | None = None) -> None:
        self._others.reward(arm, value, before)

    def forget(self, user: str) -> None:
        self._others.forget(user)


class Thompson:
    """Thompson sampling (Thompson 1933) over arms whose rewards are normal with unknown mean and
    variance. A session stays with the arm that its first request drew.

    The prior of each arm is normal-inverse-gamma with mean ``mean``, worth ``weight`` rewards, and
    variance about ``scale`` squared (Murphy 2007, "Conjugate Bayesian analysis of the Gaussian
    distribution", section 3).
    """

    def __init__(
        self,
        arms: Sequence[str],
        *,
        seed: int,
        mean: float = 0.0,
        weight: float = 1.0,
        scale: float = 1.0,
    ):
        if not arms or len({*arms}) < len(arms):
            raise ValueError(f"{arms=} must be at least one, all different")
        if not (weight > 0 and scale > 0):
            raise ValueError(f"{weight=} and {scale=} must be positive")
        self._rng = np.random.default_rng(seed)
        self._mean, self._weight, self._scale = mean, weight, scale
        self._lock = threading.Lock()
        # Of each arm the count, the mean, and the sum of squares around it (Welford 1962).
        self._seen = {arm: (0, 0.0, 0.0) for arm in arms}
        self._sessions: collections.OrderedDict[tuple[str, str], str] = collections.OrderedDict()

    @property
    def arms(self) -> Sequence[str]:
        return tuple(self._seen)

    def choose(self, user: str, session: str) -> str:
        key = user, session
        with self._lock:
            arm = self._sessions.pop(key, None)
            if arm is None:
                draws = {arm: self._draw(*seen) for arm, seen in self._seen.items()}
                arm = max(draws, key=draws.__getitem__)
            self._sessions[key] = arm
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)
        return arm

    def forget(self, user: str) -> None:
        """Forgets the sessions of a user; what their arms have earned stays in the means."""
        with self._lock:
            for key in [key for key in self._sessions if key[0] == user]:
                del self._sessions[key]

    def reward(self, arm: str, value: float, before: float | None = None) -> None:
        if not math.isfinite(value):
            raise ValueError(f"the reward {value} of arm {arm!r} must be finite")
        with self._lock:
            if arm not in self._seen:
                raise ValueError(f"no arm {arm!r}; there are {', '.join(self._seen)}")
            count, mean, squares = self._seen[arm]
            if before is not None and count > 0:
                count, mean, squares = _without(before, count, mean, squares)
            count += 1
            change = value - mean
            mean += change / count
            self._seen[arm] = count, mean, squares + change * (value - mean)

    def _draw(self, count: int, mean: float, squares: float) -> float:
        """A mean from the posterior of an arm."""
        weight = self._weight + count
        center = (self._weight * self._mean + count * mean) / weight
        # of the inverse gamma distribution of the variance
        shape = 1.0 + count / 2
        between = self._weight * count / weight * (mean - self._mean) ** 2
        rate = self._scale**2 + (squares + between) / 2
        variance = rate / self._rng.gamma(shape)
        return self._rng.normal(center, math.sqrt(variance / weight))


def _without(value: float, count: int, mean: float, squares: float) -> tuple[int, float, float]:
    """Count, mean and sum of squares of the rewards but one: a step of Welford's backwards."""
    if count == 1:
        return 0, 0.0, 0.0
    rest = mean - (value - mean) / (count - 1)
    # rounding must not make it negative
    return count - 1, rest, max(0.0, squares - (value - mean) * (value - rest))


def _check(shares: Mapping[str, float]) -> None:
    if not shares or not all(share > 0 for share in shares.values()):
        raise ValueError(f"shares={dict(shares)} must be positive, and at least one")
    if not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
        raise ValueError(f"shares={dict(shares)} sum up to {sum(shares.values())}, not to 1")
