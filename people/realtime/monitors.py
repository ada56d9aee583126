"""Monitors: alarms on the rates of a candidate, and on a reward that is gamed.

A rate is read session by session against the sessions that the deployed version has at the same
time (``standard``). A chart then looks for a shift: CUSUM (Page 1954) sums what exceeds a slack and
is quick on lasting shifts, EWMA (Roberts 1959) is a running mean. Both sides are watched unless the
config names one.

A reward is gamed when it rises and retention does not. Two signs are looked for. The reward is
better than the deployed version's beyond doubt (the confidence sequence of ``sequential``) while
retention is not better at all. Or the correlation of the two over sessions has fallen, so that the
Fisher intervals (1921) of the two versions lie apart.

Monitors are functions of the recorded sessions and keep no state, so they say the same after a
kill. An alarm stops promotion, and names the sessions to read first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np
import scipy  # reads scipy.signal and scipy.special when they are first used
from jaxtyping import Float64

from people.realtime import sequential
from people.realtime.parts import Sessions
from rl_code.config import named
from rl_code.config.named import Named
from rl_code.config.read_config import at_least

# Sessions that an alarm names.
NAMED_SESSIONS = 5
# An interval of a correlation at fewer sessions says nothing.
_LEAST_CORRELATED = 30
# In standard deviations: the most that one session may say.
_CUT = 3.0


class Chart(Protocol):
    def path(self, z: Float64[np.ndarray, " sessions"]) -> Float64[np.ndarray, " sessions"]:
        """The statistic after each session, over its threshold: above 1 is an alarm."""
        ...


@dataclasses.dataclass(frozen=True)
class Cusum:
    """S_t = max(0, S_(t-1) + z_t - slack), with an alarm above the threshold."""

    # Half the shift that is to be found soonest, in standard deviations.
    slack: float = 0.35
    # In standard deviations; larger is later and with fewer false alarms.
    threshold: float = 20.0

    def __post_init__(self) -> None:
        if not (self.slack >= 0 and self.threshold > 0):
            raise ValueError(f"{self.slack=} must be at least 0 and {self.threshold=} above it")

    def path(self, z: Float64[np.ndarray, " sessions"]) -> Float64[np.ndarray, " sessions"]:
        sums = np.cumsum(z - self.slack)
        # the recursion written out: the sum since it was last at its lowest
        return (sums - np.minimum(np.minimum.accumulate(sums), 0.0)) / self.threshold


@dataclasses.dataclass(frozen=True)
class Ewma:
    """E_t = (1 - weight) E_(t-1) + weight z_t, with an alarm above limit standard deviations."""

    weight: float = 0.05
    # In standard deviations of E_t as it is in the long run.
    limit: float = 4.5

    def __post_init__(self) -> None:
        if not (0 < self.weight <= 1 and self.limit > 0):
            raise ValueError(f"{self.weight=} must be in (0, 1] and {self.limit=} positive")

    def path(self, z: Float64[np.ndarray, " sessions"]) -> Float64[np.ndarray, " sessions"]:
        means = scipy.signal.lfilter([self.weight], [1, self.weight - 1], z)
        return means / (self.limit * math.sqrt(self.weight / (2 - self.weight)))


CHARTS = {"cusum": Cusum, "ewma": Ewma}


@dataclasses.dataclass(frozen=True)
class Monitor:
    """One rate and the chart that watches it."""

    metric: str
    chart: Named = dataclasses.field(default_factory=lambda: Named("cusum"))
    # Direction of a change that is an alarm.
    side: Literal["up", "down", "both"] = "both"


@dataclasses.dataclass(frozen=True)
class MonitorsConfig:
    """Settings of the monitors: the metrics that they watch."""

    rates: tuple[Monitor, ...] = ()
    # The two metrics that must rise together; None to leave that out.
    reward: str | None = "reward"
    retention: str = "retained"
    # The size of a rise of the reward that matters (``sequential.difference``).
    reward_scale: float = 0.05
    # Sessions of the deployed version without which a rate has nothing to be compared with.
    least_sessions: int = 50

    def __post_init__(self) -> None:
        at_least(self, least_sessions=2)
        if self.reward_scale <= 0:
            raise ValueError(f"{self.reward_scale=} must be positive")
        names = [one.metric for one in self.rates]
        if len(set(names)) < len(names):
            raise ValueError(f"a metric is watched twice: {', '.join(names)}")


@dataclasses.dataclass(frozen=True)
class Alarm:
    """Alarm of a monitor."""

    monitor: str
    text: str
    # Names of the sessions to read first.
    sessions: tuple[str, ...]


def alarms(config: MonitorsConfig, deployed: Sessions, candidate: Sessions) -> list[Alarm]:
    """Alarms about a candidate's sessions in comparison with the deployed version's.

    Raises ValueError for a metric that nobody recorded, ConfigError for an unknown chart.
    """
    found = []
    for number, monitor in enumerate(config.rates):
        path = f"config.monitors.rates[{number}].chart"
        chart = named.make(CHARTS, monitor.chart, path)
        alarm = _rate(monitor, chart, config.least_sessions, deployed, candidate)
        if alarm is not None:
            found.append(alarm)
    if config.reward is not None:
        alarm = _gamed(config, config.reward, deployed, candidate)
        if alarm is not None:
            found.append(alarm)
    return found


def unknown(config: MonitorsConfig, deployed: Sessions, candidate: Sessions) -> list[str]:
    """The metrics among those watched of which nothing can be said yet: no session of the candidate
    has them, or too few of the deployed version.
    """
    names = [monitor.metric for monitor in config.rates]
    if config.reward is not None:
        names += [config.reward, config.retention]
    return [
        name
        for name in dict.fromkeys(names)
        if np.isnan(candidate.metric(name)).all()
        or np.sum(~np.isnan(deployed.metric(name))) < config.least_sessions
    ]


def _rate(
    monitor: Monitor, chart: Chart, least: int, deployed: Sessions, candidate: Sessions
) -> Alarm | None:
    before = deployed.metric(monitor.metric)
    before = before[~np.isnan(before)]
    values = candidate.metric(monitor.metric)
    known = ~np.isnan(values)
    if before.size < least or not known.any():
        return None
    z = standard(before, values[known])
    names = candidate.session[known]
    sides = {"up": 1, "down": -1}
    for side, sign in sides.items():
        path = chart.path(sign * z)
        if monitor.side not in (side, "both") or path.max() <= 1:
            continue
        crossed = int(np.argmax(path > 1))
        # Those that pushed it over: of the sessions up to there since it last was at zero.
        quiet = np.flatnonzero(path[:crossed] <= 0)
        first = int(quiet[-1]) + 1 if quiet.size else 0
        order = first + np.argsort(-sign * z[first : crossed + 1], kind="stable")
        text = (
            f"{monitor.metric} goes {side}: mean {values[known].mean():.4g} in {z.size} sessions, "
            f"{before.mean():.4g} with the deployed version; crossed at session {crossed + 1}"
        )
        return Alarm(monitor.metric, text, tuple(map(str, names[order[:NAMED_SESSIONS]])))
    return None


def standard(
    before: Float64[np.ndarray, " n"], values: Float64[np.ndarray, " sessions"]
) -> Float64[np.ndarray, " sessions"]:
    """Standard scores of values among the values before: mean 0 and deviation 1 if nothing has
    changed.

    They are normal scores of the ranks, so that one long latency or answer is no alarm, divided by
    their own deviation and cut at ``_CUT``, so that a few of what is rare are none either.
    """
    order = np.sort(before)

    def scores(x: np.ndarray) -> np.ndarray:
        # the middle of the rank among equal values
        rank = (np.searchsorted(order, x, "left") + np.searchsorted(order, x, "right")) / 2
        return scipy.special.ndtri((rank + 0.5) / (order.size + 1))

    usual = scores(before)
    # A rate that never changed has no deviation; any other value is then as far off as can be.
    deviation = max(float(usual.std()), 1e-6)
    return np.clip((scores(values) - usual.mean()) / deviation, -_CUT, _CUT)


def _gamed(
    config: MonitorsConfig, reward: str, deployed: Sessions, candidate: Sessions
) -> Alarm | None:
    rise = sequential.difference(
        sequential.arm(deployed.user, deployed.metric(reward)),
        sequential.arm(candidate.user, candidate.metric(reward)),
        scale=config.reward_scale,
    )
    kept_before = sequential.arm(deployed.user, deployed.metric(config.retention))
    kept = sequential.arm(candidate.user, candidate.metric(config.retention))
    before = correlation(deployed, reward, config.retention)
    now = correlation(candidate, reward, config.retention)
    if rise.low > 0 and kept.mean <= kept_before.mean:
        text = (
            f"{reward} rises by {rise.mean:.4g} (at least {rise.low:.4g}) and {config.retention} "
            f"does not: {kept_before.mean:.4g} to {kept.mean:.4g}"
        )
    elif before is not None and now is not None and now[2] < before[1]:
        text = (
            f"{reward} and {config.retention} agree less: correlation {now[0]:.2f}, at most "
            f"{now[2]:.2f}, with the deployed version {before[0]:.2f}, at least {before[1]:.2f}"
        )
    else:
        return None
    # read those first that were paid most for what was kept least
    both = candidate.metric(reward) - candidate.metric(config.retention)
    order = np.argsort(-np.nan_to_num(both, nan=-np.inf), kind="stable")
    return Alarm("gamed", text, tuple(map(str, candidate.session[order[:NAMED_SESSIONS]])))


def correlation(sessions: Sessions, one: str, other: str) -> tuple[float, float, float] | None:
    """Pearson's correlation of two metrics over sessions, and the ends of its 95 % interval by
    Fisher's transformation; None for too few sessions, or where one of the two never changes.
    """
    first = sessions.metric(one)
    second = sessions.metric(other)
    known = ~(np.isnan(first) | np.isnan(second))
    first, second = first[known], second[known]
    if first.size < _LEAST_CORRELATED or not first.std() or not second.std():
        return None
    value = float(np.corrcoef(first, second)[0, 1])
    middle = math.atanh(min(max(value, -1 + 1e-12), 1 - 1e-12))
    half = 1.96 / math.sqrt(first.size - 3)
    return value, math.tanh(middle - half), math.tanh(middle + half)


def summary(sessions: Sessions) -> Mapping[str, float]:
    """Metric -> its mean over sessions that have it."""
    means = {}
    for name, values in sessions.values.items():
        known = values[~np.isnan(values)]
        if known.size:
            means[name] = float(known.mean())
    return means
