"""Decision of a candidate's A/B test so far: go on, promote, or roll back.

The metric has a confidence sequence of its difference between the arms, and each guardrail a
one-sided one of its harm. They hold at all looks at once (``sequential``), so this is asked after
every session. The level of the guardrails is shared out among them, so that a candidate that harms
nothing is rolled back by any of them with probability ``guardrail_alpha`` at most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from people.realtime import sequential
from people.realtime.parts import Sessions
from rl_code.config.read_config import at_least
from rl_code.evaluation.passk import Interval


@dataclasses.dataclass(frozen=True)
class Guardrail:
    """A metric that may not get worse."""

    metric: str
    # Direction of a change that is harm.
    harm: Literal["up", "down"]
    # The size of harm that matters, in units of the metric (``sequential.difference``).
    scale: float
    # Harm that is accepted, in units of the metric. While an arm has too few users who have the
    # metric, nothing is promoted.
    allowed: float = 0.0

    def __post_init__(self) -> None:
        if not self.scale > 0 or not self.allowed >= 0:
            raise ValueError(f"{self.scale=} must be positive and {self.allowed=} at least 0")


@dataclasses.dataclass(frozen=True)
class WatchConfig:
    """Settings of the watch over a candidate: the test, its length, and its outcome."""

    # The share of users whom a candidate serves.
    share: float = 0.2
    # The metric that the candidate is judged by; larger is better.
    metric: str = "retained"
    # The size of a difference that matters, in units of the metric.
    scale: float = 0.02
    # Promoted once the lower end of the interval is above -margin. 0 asks for proof that it is
    # better; a margin takes it for as good.
    margin: float = 0.02
    # The level of the interval, and of all guardrails together.
    alpha: float = 0.05
    guardrail_alpha: float = 0.05
    guardrails: tuple[Guardrail, ...] = ()
    # Users of each arm before anything is said.
    least_users: int = sequential.LEAST_USERS
    # Seconds that it is watched at least before it is promoted, and at most.
    least_s: float = 0.0
    most_s: float = 86_400.0
    # Sessions of both arms together after which it ends too, so that a test is as long on a slow
    # machine as on a fast one where people are simulated. None for no such end.
    most_sessions: int | None = None
    # Fate of a candidate about which the longest time proves nothing. "promote" takes what may be
    # worse, so it is for rehearsals. One that too few users had is always rolled back.
    at_end: Literal["promote", "roll_back"] = "roll_back"

    def __post_init__(self) -> None:
        at_least(self, margin=0, least_users=2, least_s=0, most_s=0)
        if self.most_sessions is not None:
            at_least(self, most_sessions=1)
        if not 0 < self.share < 1:
            raise ValueError(f"{self.share=} must be above 0 and below 1")
        if not self.scale > 0:
            raise ValueError(f"{self.scale=} must be positive, in units of {self.metric}")
        names = [one.metric for one in self.guardrails]
        if len(set(names)) < len(names):
            raise ValueError(f"a metric has two guardrails: {', '.join(names)}")
        for name in ("alpha", "guardrail_alpha"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 0.5")


@dataclasses.dataclass(frozen=True)
class Look:
    """One look at the test: its numbers so far, and the decision."""

    decision: Literal["wait", "promote", "roll_back"]
    reason: str
    # Sessions and users of the deployed version and of the candidate.
    sessions: tuple[int, int]
    users: tuple[int, int]
    # The metric in the two arms, and candidate minus deployed, with confidence sequences; without
    # ends before there are enough users.
    arms: tuple[Interval, Interval]
    difference: Interval
    # Guardrail -> lower bound of its harm, and harm that is allowed.
    harms: Mapping[str, tuple[float, float]]
    # True after the longest time, or the most sessions.
    over: bool

    def as_json(self) -> dict[str, Any]:
        """Plain values, null for what is not finite."""
        return finite(dataclasses.asdict(self))


def look(config: WatchConfig, deployed: Sessions, candidate: Sessions, watched_s: float) -> Look:
    """Decision of the test after these sessions.

    watched_s: seconds since the candidate was deployed. Raises ValueError for a metric that nobody
    recorded.
    """
    before = sequential.arm(deployed.user, deployed.metric(config.metric))
    after = sequential.arm(candidate.user, candidate.metric(config.metric))
    users = {"least_users": config.least_users}
    found = sequential.difference(before, after, scale=config.scale, alpha=config.alpha, **users)
    harms = {}
    for guardrail in config.guardrails:
        name = guardrail.metric
        sign = 1 if guardrail.harm == "up" else -1
        bound = sequential.bound(
            sequential.arm(deployed.user, sign * deployed.metric(name)),
            sequential.arm(candidate.user, sign * candidate.metric(name)),
            scale=guardrail.scale,
            alpha=config.guardrail_alpha / len(config.guardrails),
            **users,
        )
        harms[name] = (bound, guardrail.allowed)
    sessions = len(deployed.session), len(candidate.session)
    most = math.inf if config.most_sessions is None else config.most_sessions
    over = watched_s >= config.most_s or sum(sessions) >= most
    length = f"{watched_s:.0f} s and {sum(sessions)} sessions"
    decision, reason = _decide(config, found, harms, watched_s, length if over else "")
    return Look(
        decision,
        reason,
        sessions,
        (before.users, after.users),
        (_around(config, before), _around(config, after)),
        found,
        harms,
        over,
    )


def _around(config: WatchConfig, arm: sequential.Arm) -> Interval:
    """The mean of one arm."""
    if arm.users < config.least_users:
        return Interval(arm.mean, -math.inf, math.inf)
    width = float(sequential.radius(np.float64(arm.variance), config.scale, config.alpha))
    return Interval(arm.mean, arm.mean - width, arm.mean + width)


def _decide(
    config: WatchConfig,
    found: Interval,
    harms: Mapping[str, tuple[float, float]],
    watched_s: float,
    over: str,
) -> tuple[Literal["wait", "promote", "roll_back"], str]:
    """Decision and reason. over: how long the test was if it is over, else empty."""
    # a bound without end: fewer than least_users of an arm have the metric
    unknown = [name for name, (bound, _) in harms.items() if math.isinf(bound)]
    for name, (bound, allowed) in harms.items():
        if bound > allowed:
            return "roll_back", (
                f"guardrail {name}: worse by at least {bound:.4g}, allowed {allowed:.4g}"
            )
    shown = f"{config.metric} {found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
    if found.high < 0:
        return "roll_back", f"{shown}: worse than the deployed version"
    if found.low > -config.margin and watched_s >= config.least_s and not unknown:
        return "promote", f"{shown}: the lower end is above {-config.margin:+.4f}"
    if over:
        # an interval without ends: an arm has fewer than least_users
        if math.isinf(found.low):
            return "roll_back", f"fewer than {config.least_users} users in {over}"
        if unknown:
            return "roll_back", f"{shown}: {_says_nothing(config, unknown)} in {over}"
        return config.at_end, f"{shown}: nothing proven in {over}"
    return "wait", f"{shown}; {_says_nothing(config, unknown)}" if unknown else shown


def _says_nothing(config: WatchConfig, guardrails: Sequence[str]) -> str:
    """A guardrail that nobody reported protects nobody, so nothing is promoted past it."""
    users = f"fewer than {config.least_users} users of an arm have it"
    return f"guardrail {', '.join(guardrails)} says nothing, {users}"


def finite(value: Any) -> Any:
    """A JSON value with null in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
