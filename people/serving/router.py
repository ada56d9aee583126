"""Routers choose the arm that answers a user: fixed shares of users, or Thompson sampling."""

from __future__ import annotations

import collections
import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from absl import logging

from people.serving.changes import SinceChange
from rl_code.run.serving import AutoConfig

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

    def reward(self, arm: str, value: float) -> None:
        """An answer of an arm has earned this much. Said once of an answer, when it is known: one
        that waits for what people do with it is no reward of 0.
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

    def reward(self, arm: str, value: float) -> None:
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

    def reward(self, arm: str, value: float) -> None:
        self._others.reward(arm, value)

    def forget(self, user: str) -> None:
        self._others.forget(user)


class Thompson:
    """Thompson sampling (Thompson 1933) over arms whose rewards are normal with unknown mean and
    variance. A session stays with the arm that its first request drew.

    - The prior of each arm is normal-inverse-gamma (Murphy 2007, "Conjugate Bayesian analysis of
      the Gaussian distribution", section 3); ``AutoConfig`` says its settings.
    - Rewards come late. An answer whose reward is not known yet counts for nothing, so the draws
      stay as far apart as what is known allows, and sessions spread over the arms meanwhile
      (Joulani, György and Szepesvári 2013, "Online Learning under Delayed Feedback"; Chapelle and
      Li 2011, "An Empirical Evaluation of Thompson Sampling", section 5).
    - An arm whose rewards have changed (``changes``) is judged by those since then.

    The draw of a session follows from the seed, the user, the session and the rewards so far, in
    their order. So the same record gives the same choices, however many others ask in between.
    """

    def __init__(self, arms: Sequence[str], config: AutoConfig):
        if not arms or len({*arms}) < len(arms):
            raise ValueError(f"{arms=} must be at least one, all different")
        self._config = config
        self._lock = threading.Lock()
        self._earned = {arm: SinceChange(config.false_alarm, config.scale) for arm in arms}
        self._sessions: collections.OrderedDict[tuple[str, str], str] = collections.OrderedDict()

    @property
    def arms(self) -> Sequence[str]:
        return tuple(self._earned)

    def choose(self, user: str, session: str) -> str:
        key = user, session
        with self._lock:
            arm = self._sessions.pop(key, None) or self._draw(user, session)
            self._sessions[key] = arm
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)
        return arm

    def forget(self, user: str) -> None:
        """Forgets the sessions of a user; what their arms have earned stays in the means."""
        with self._lock:
            for key in [key for key in self._sessions if key[0] == user]:
                del self._sessions[key]

    def reward(self, arm: str, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"the reward {value} of arm {arm!r} must be finite")
        with self._lock:
            if arm not in self._earned:
                raise ValueError(f"no arm {arm!r}; there are {', '.join(self._earned)}")
            changed = self._earned[arm].add(value)
            kept = self._earned[arm].count
        if changed:
            logging.warning("the rewards of %s have changed: only the last %d count", arm, kept)

    def _draw(self, user: str, session: str) -> str:
        """An arm for a session that has none."""
        text = f"{self._config.seed} {len(user)} {user}{session}"
        rng = np.random.default_rng(list(hashlib.sha256(text.encode()).digest()))
        means = {
            arm: draw_mean(rng, self._config, one.count, one.mean, one.squares)
            for arm, one in self._earned.items()
        }
        return max(means, key=means.__getitem__)


def draw_mean(
    rng: np.random.Generator, prior: AutoConfig, count: int, mean: float, squares: float
) -> float:
    """A mean from the posterior of an arm (Murphy 2007, section 3).

    count, mean, squares: of its rewards, the last the sum of squares around their mean.
    """
    weight = prior.weight + count
    center = (prior.weight * prior.mean + count * mean) / weight
    # of the inverse gamma distribution of the variance
    shape = 1.0 + count / 2
    between = prior.weight * count / weight * (mean - prior.mean) ** 2
    rate = prior.scale**2 + (squares + between) / 2
    variance = rate / rng.gamma(shape)
    return rng.normal(center, math.sqrt(variance / weight))


def _check(shares: Mapping[str, float]) -> None:
    if not shares or not all(share > 0 for share in shares.values()):
        raise ValueError(f"shares={dict(shares)} must be positive, and at least one")
    if not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
        raise ValueError(f"shares={dict(shares)} sum up to {sum(shares.values())}, not to 1")
