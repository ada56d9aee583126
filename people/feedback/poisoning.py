"""Weights of the answers of a training set, so that nobody can steer training alone.

The store refuses events for the answers of others and counts repetitions once. What is left is a
person who lies about their own answers, or a program with keys. Two defences:

1. *Implausible regularity lowers weight*, of a user and of an origin (all users whose keys come
   from one place, ``AnswerRecord.extra["origin"]``). People's times to decide vary: for each of 16
   programmers of published telemetry the standard deviation of log seconds is 0.9 to 1.7. And
   people accept more where the model is more confident, at rates that differ between them by a
   bounded amount.
2. *Influence is bounded*: no user has more than a share of the total weight, and no origin has more
   than another share, however many keys it has.

Whoever counts less is listed with the reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

from people.feedback.rewards.answered import Answered

# Log seconds below this are the clock's grain, not a person's.
_LEAST_S = 1e-3
# The two bounds are applied in turn at most so often, and given up when less of the weight is left
# than this share.
_PASSES = 200
_LEAST_LEFT = 0.05


@dataclasses.dataclass(frozen=True)
class PoisoningConfig:
    """Bounds of plausible behaviour, and the most that one user or origin may count."""

    # Most of the total weight that one user, and one origin, may have.
    user_share: float = 0.1
    origin_share: float = 0.3
    # Fewer decisions than this say nothing about regularity.
    least: int = 20
    # Standard deviation of log seconds to decide, below which weight falls in proportion. The
    # steadiest of 16 programmers has 0.91.
    least_spread: float = 0.4
    # Spread of the log-odds of acceptance among people (standard deviation), and the number of
    # standard deviations from the population are plausible.
    habits: float = 0.5
    most_deviation: float = 3.0
    # Groups of equally confident answers, within which accept rates are compared.
    bins: int = 5

    def __post_init__(self) -> None:
        for name in ("user_share", "origin_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0 and at most 1")
        for name in ("least_spread", "habits", "most_deviation"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.least < 2 or self.bins < 1:
            raise ValueError(f"{self.least=} must be at least 2 and {self.bins=} at least 1")


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A user who counts less than their answers would, and why."""

    user: str
    # steady_times, accept_rate, or one of them after "of_origin "; share.
    reason: str
    # Weight of each of the user's answers, 0 to 1.
    weight: float
    text: str


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weight of each answer, 0 to 1, and who is listed."""

    weights: Float64[np.ndarray, " answers"]
    suspects: tuple[Suspect, ...]


def weigh(given: Sequence[Answered], config: PoisoningConfig) -> Weights:
    """Weights for the answers of a training set. Multiply their advantages or losses by them."""
    if not given:
        return Weights(np.zeros(0), ())
    users, user_of = np.unique([one.answer.user for one in given], return_inverse=True)
    origin_of = _origins(given)
    weights, found = _judged(given, users, user_of, origin_of, config)
    fair, weights = weights, _bounded_both(weights, user_of, origin_of, config)
    lowered = weights < fair * (1 - 1e-9) * (weights / np.maximum(fair, 1e-300)).max()
    for user in np.unique(user_of[lowered]):
        total = fair[user_of == user].sum() / fair.sum()
        text = f"{total:.1%} of the weight before influence is bounded"
        found[str(users[user]), "share"] = text
    most = {str(user): float(weights[user_of == u].max()) for u, user in enumerate(users)}
    suspects = [
        Suspect(user, reason, most[user], text) for (user, reason), text in sorted(found.items())
    ]
    return Weights(weights, tuple(suspects))


def implausible(given: Sequence[Answered], config: PoisoningConfig) -> set[str]:
    """Users whose behaviour is too regular to be a person's. Who only has a large share is not one
    of them: in a comparison of users each counts once.
    """
    if not given:
        return set()
    users, user_of = np.unique([one.answer.user for one in given], return_inverse=True)
    _, found = _judged(given, users, user_of, _origins(given), config)
    return {user for user, _ in found}


def _judged(
    given: Sequence[Answered],
    users: np.ndarray,
    user_of: np.ndarray,
    origin_of: np.ndarray,
    config: PoisoningConfig,
) -> tuple[Float64[np.ndarray, " answers"], dict[tuple[str, str], str]]:
    """Weights by what is implausible, and (user, reason) -> text of those who are lowered."""
    decisions = _Decisions.read(given, config)
    weights = np.ones(len(given))
    found: dict[tuple[str, str], str] = {}
    for prefix, group_of in (("", user_of), ("of_origin ", origin_of)):
        if prefix and origin_of.max() == user_of.max():
            break  # nobody says where keys come from, or each place has one user
        # fewer answers say nothing, and most people have few
        for number in np.flatnonzero(np.bincount(group_of) >= config.least):
            mine = group_of == number
            for reason, factor, text in decisions.judge(mine, origin_of, config):
                weights[mine] *= factor
                for user in np.unique(user_of[mine]):
                    found[str(users[user]), prefix + reason] = text
    return weights, found


def _origins(given: Sequence[Answered]) -> Int64[np.ndarray, " answers"]:
    """The number of the origin of each answer."""
    return np.unique([_origin(one) for one in given], return_inverse=True)[1]


def _origin(one: Answered) -> str:
    """Origin of the user's key; the user itself if the server does not know the origin."""
    origin = one.answer.extra.get("origin")
    return f"origin {origin}" if origin else f"user {one.answer.user}"


@dataclasses.dataclass(frozen=True)
class _Decisions:
    """Decisions of people about answers that they saw."""

    # -1 no decision, 0 rejected, 1 accepted.
    accepted: Int64[np.ndarray, " answers"]
    # Log of the seconds that it took; nan if it was not said.
    log_s: Float64[np.ndarray, " answers"]
    # Group of equally confident answers.
    bin: Int64[np.ndarray, " answers"]

    @classmethod
    def read(cls, given: Sequence[Answered], config: PoisoningConfig) -> _Decisions:
        accepted, log_s = np.full(len(given), -1), np.full(len(given), np.nan)
        for i, one in enumerate(given):
            decided = [event for event in one.events if event.kind in ("accepted", "rejected")]
            if decided:
                accepted[i] = decided[0].kind == "accepted"
                if decided[0].value is not None:
                    log_s[i] = math.log(max(decided[0].value, _LEAST_S))
        # the mean log-probability of the tokens: what the model itself believes
        confidence = np.array([np.mean(one.answer.logprobs or (0.0,)) for one in given])
        edges = np.quantile(confidence, np.linspace(0, 1, config.bins + 1)[1:-1])
        return cls(accepted, log_s, np.searchsorted(edges, confidence))

    def judge(
        self, mine: np.ndarray, origin_of: np.ndarray, config: PoisoningConfig
    ) -> list[tuple[str, float, str]]:
        """Reason, factor of the weight and text for what is implausible in some answers."""
        found = []
        times = self.log_s[mine & ~np.isnan(self.log_s)]
        if len(times) >= config.least and (spread := float(np.std(times))) < config.least_spread:
            text = f"{len(times)} decisions whose log seconds spread by {spread:.3f}"
            found.append(("steady_times", spread / config.least_spread, text))
        decided = mine & (self.accepted >= 0)
        if decided.sum() >= config.least:
            deviation, expected = self._deviation(decided, origin_of, config)
            if abs(deviation) > config.most_deviation:
                rate = float(np.mean(self.accepted[decided]))
                text = (
                    f"accepts {rate:.1%} of {decided.sum()} where others accept {expected:.1%} of "
                    f"as confident ones, {abs(deviation):.1f} standard deviations away"
                )
                # how likely such a person is against one that is just plausible
                factor = math.exp((config.most_deviation**2 - deviation**2) / 2)
                found.append(("accept_rate", factor, text))
        return found

    def _deviation(
        self, mine: np.ndarray, origin_of: np.ndarray, config: PoisoningConfig
    ) -> tuple[float, float]:
        """Return the number of standard deviations between the number accepted and the number that
        others would accept at the same confidence, and the rate of the others. Others are of other
        origins, and each origin counts once, so that many keys of one do not become the population.
        """
        others = (self.accepted >= 0) & ~np.isin(origin_of, np.unique(origin_of[mine]))
        if not others.any():
            return 0.0, float(np.mean(self.accepted[mine]))
        overall = _mean_of_means(self.accepted[others], origin_of[others])
        expected = np.zeros(mine.sum())
        for bin in np.unique(self.bin[mine]):
            same = others & (self.bin == bin)
            rate = _mean_of_means(self.accepted[same], origin_of[same]) if same.any() else overall
            # away from 0 and 1, which a few decisions of others would claim
            expected[self.bin[mine] == bin] = np.clip(rate, 0.02, 0.98)
        chance = expected * (1 - expected)
        # of the decisions, and of people's habits, which move all chances together
        variance = chance.sum() + (config.habits * chance.sum()) ** 2
        deviation = (self.accepted[mine].sum() - expected.sum()) / math.sqrt(variance)
        return float(deviation), float(expected.mean())


def _mean_of_means(values: np.ndarray, group_of: np.ndarray) -> float:
    _, place = np.unique(group_of, return_inverse=True)
    return float(np.mean(np.bincount(place, values) / np.bincount(place)))


def _bounded_both(
    weights: np.ndarray, user_of: np.ndarray, origin_of: np.ndarray, config: PoisoningConfig
) -> np.ndarray:
    """Weights of which no user and no origin has more than its share.

    Each bound lowers the total that the other one is a share of, so both are applied in turn until
    neither changes anything. With few users or origins they cannot both be kept: then each is
    applied once.
    """
    first = None
    for _ in range(_PASSES):
        before = weights
        for group_of, share in ((user_of, config.user_share), (origin_of, config.origin_share)):
            totals = np.bincount(group_of, weights)
            factors = _bounded(totals, share) / np.where(totals > 0, totals, 1.0)
            weights = weights * factors[group_of]
        first = weights if first is None else first
        if np.all(weights >= before * (1 - 1e-6)):
            return weights
        if weights.sum() < first.sum() * _LEAST_LEFT:
            break
    return first


def _bounded(totals: Float64[np.ndarray, " groups"], share: float) -> np.ndarray:
    """The totals, each lowered so far that it is at most a share of what their sum then is. With at
    most 1 / share groups no bound can be kept; all become equal.
    """
    order = np.sort(totals[totals > 0])[::-1]
    if len(order) * share <= 1:
        return np.minimum(totals, order[-1]) if len(order) else totals
    # With the k largest at the bound c, c = share * (k * c + rest). The smallest k that fits is
    # right, and one below 1 / share does.
    for k in range(len(order)):
        bound = share * order[k:].sum() / (1 - share * k)
        if order[k] <= bound * (1 + 1e-12):
            return np.minimum(totals, bound)
    raise AssertionError("some number of groups at the bound fits")
