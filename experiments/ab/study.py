"""Simulations of the A/B test: wrong alarms in A/A tests, power, time to a rollback.

Ways to read a test that is looked at after every session, from the one that nobody should use to
the one that the cycle uses. All say "differs" at a level of 5 %.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy  # reads scipy.stats when it is first used
from jaxtyping import Bool, Float64

from experiments.ab import simulate
from experiments.ab.simulate import Metric, Running, Stream
from experiments.report import Estimate
from people.realtime import monitors, sequential
from people.realtime.watching import WatchConfig

ALPHA = 0.05
LEAST_SESSIONS = 100  # of each arm, before sessions are taken for units
_Z = statistics.NormalDist().inv_cdf(1 - ALPHA / 2)

type Arms = tuple[Running, Running]
# After each session: whether the test says that the arms differ.
type Reader = Callable[[Stream, float], Bool[np.ndarray, " sessions"]]


def z_by_session(stream: Stream, scale: float) -> Bool[np.ndarray, " sessions"]:
    """A z-test for which every session is a unit."""
    return _beyond(simulate.by_session(stream), LEAST_SESSIONS, lambda v: _Z * np.sqrt(v))


def z_by_user(stream: Stream, scale: float) -> Bool[np.ndarray, " sessions"]:
    """A z-test of one number per user."""
    arms = simulate.by_user(stream)
    return _beyond(arms, sequential.LEAST_USERS, lambda v: _Z * np.sqrt(v))


def z_at_the_end(stream: Stream, scale: float) -> Bool[np.ndarray, " sessions"]:
    """The same, looked at once, when all sessions are in."""
    found = z_by_user(stream, scale)
    found[:-1] = False
    return found


def sequence_by_session(stream: Stream, scale: float) -> Bool[np.ndarray, " sessions"]:
    """A confidence sequence for which every session is a unit."""
    arms = simulate.by_session(stream)
    return _beyond(arms, LEAST_SESSIONS, lambda v: sequential.radius(v, scale, ALPHA))


def sequence_by_user(stream: Stream, scale: float) -> Bool[np.ndarray, " sessions"]:
    """The cycle's: a confidence sequence of one number per user."""
    arms = simulate.by_user(stream)
    return _beyond(arms, sequential.LEAST_USERS, lambda v: sequential.radius(v, scale, ALPHA))


def guardrail(stream: Stream, scale: float) -> Bool[np.ndarray, " sessions"]:
    """The cycle's guardrail: the same, one-sided; larger values are harm."""
    arms = simulate.by_user(stream)
    radius = lambda v: sequential.radius_below(v, scale, ALPHA)  # noqa: E731
    return _beyond(arms, sequential.LEAST_USERS, radius, one_sided=True)


READERS: Mapping[str, Reader] = {
    "z-test, sessions": z_by_session,
    "z-test, users": z_by_user,
    "z-test, users, one look at the end": z_at_the_end,
    "confidence sequence, sessions": sequence_by_session,
    "confidence sequence, users": sequence_by_user,
    "one-sided confidence sequence, users": guardrail,
}


@dataclasses.dataclass(frozen=True)
class Rejections:
    """Number of tests that a reader has rejected, by session."""

    reader: str
    metric: str
    share: float  # of users who get the candidate
    tests: int
    # Session of the first rejection of each test that was rejected at all, sorted.
    at: Float64[np.ndarray, " rejected"]

    @property
    def rate(self) -> Estimate:
        """Share of the tests, with the exact interval of Clopper and Pearson (1934)."""
        found = scipy.stats.binomtest(self.at.size, self.tests)
        ends = found.proportion_ci(0.95, "exact")
        return Estimate(self.at.size / self.tests, float(ends.low), float(ends.high))


def same_arms(
    rng: np.random.Generator,
    metric: Metric,
    readers: Sequence[str],
    *,
    share: float,
    tests: int,
    users: int,
    sessions: int,
    factor: float = 1.0,
) -> list[Rejections]:
    """A/A tests, read after every session by each reader; A/B ones with another factor."""
    scale = 0.05 * metric.mean
    at: dict[str, list[int]] = {reader: [] for reader in readers}
    size = dict(tests=tests, users=users, sessions=sessions)
    for stream in simulate.streams(rng, metric, share=share, factor=factor, **size):
        for reader in readers:
            says = READERS[reader](stream, scale)
            if says.any():
                at[reader].append(int(np.argmax(says)) + 1)
    return [
        Rejections(reader, metric.name, share, tests, np.sort(np.array(found, np.float64)))
        for reader, found in at.items()
    ]


@dataclasses.dataclass(frozen=True)
class Power:
    """Sessions until a true effect is seen."""

    metric: str
    effect: float  # relative
    sessions: int  # of each user
    # Users of both arms at the looks, and share of tests that have seen it by then.
    users: Float64[np.ndarray, " looks"]
    seen: Float64[np.ndarray, " looks"]
    # The same for a test of that size that is looked at once.
    once: Float64[np.ndarray, " looks"]

    def needed(self, share: float, curve: Float64[np.ndarray, " looks"]) -> float:
        """Users at which a curve reaches a share; inf if it never does."""
        reached = curve >= share
        return float(self.users[np.argmax(reached)]) if reached.any() else float("inf")


def power(
    rng: np.random.Generator,
    metric: Metric,
    *,
    effect: float,
    tests: int,
    users: int,
    sessions: int = 20,
    looks: int = 200,
) -> Power:
    """Tests of a candidate that is better by a share ``effect``; half of the users get it. Users
    come one after the other, with ``sessions`` each, and are looked at ``looks`` times.
    """
    at = np.unique(np.linspace(users / looks, users, looks).astype(int)) - 1
    seen = np.zeros(at.size)
    for _ in range(tests):
        treated = rng.random(users) < 0.5
        means = np.where(
            treated, metric.users(rng, users, 1 + effect), metric.users(rng, users, 1.0)
        )
        values = _mean_of_sessions(rng, metric, means, sessions)
        # users come once, with all of their sessions
        arms = simulate.by_session(Stream(np.arange(users), treated, values))
        radius = lambda v: sequential.radius(v, effect * metric.mean, ALPHA)  # noqa: E731
        seen += np.maximum.accumulate(_beyond(arms, sequential.LEAST_USERS, radius)[at])
    error = metric.deviation(sessions) * 2 / np.sqrt(at + 1)
    once = scipy.stats.norm.cdf(effect * metric.mean / error - _Z)
    return Power(metric.name, effect, sessions, at + 1.0, seen / tests, once)


@dataclasses.dataclass(frozen=True)
class Delay:
    """Time for which a version that is bad on purpose serves people."""

    effect: float  # relative
    tests: int
    # Sessions of the candidate until it is rolled back, and users who had it; of the tests in
    # which it is, sorted.
    sessions: Float64[np.ndarray, " found"]
    users: Float64[np.ndarray, " found"]


def rollback(
    rng: np.random.Generator,
    metric: Metric,
    *,
    effect: float,
    tests: int,
    users: int,
    sessions: int,
    share: float,
    guardrails: int,
) -> Delay:
    """A candidate whose metric is lower by a share ``effect``, under one of several guardrails that
    share the level.
    """
    found = []
    size = dict(tests=tests, users=users, sessions=sessions)
    for stream in simulate.streams(rng, metric, share=share, factor=1 - effect, **size):
        harm = dataclasses.replace(stream, value=-stream.value)
        arms = simulate.by_user(harm)
        radius = lambda v: sequential.radius_below(v, 0.05 * metric.mean, ALPHA / guardrails)  # noqa: E731
        says = _beyond(arms, sequential.LEAST_USERS, radius, one_sided=True)
        if says.any():
            when = int(np.argmax(says))
            found.append((float(stream.treated[: when + 1].sum()), float(arms[1].count[when])))
    seen = np.sort(np.array(found, np.float64).reshape(-1, 2), axis=0)
    return Delay(effect, tests, seen[:, 0], seen[:, 1])


@dataclasses.dataclass(frozen=True)
class Ends:
    """Outcomes of candidates under a config's whole rule, in shares of the tests."""

    harm: float  # by how much the candidate's metric is lower, in its units
    users: int
    sessions: int
    tests: int
    # Rolled back for the metric or a guardrail; promoted by proof; at the end without a proof,
    # whatever the config then does; rolled back for too few users.
    worse: float
    proven: float
    open: float
    few: float


def ends(
    rng: np.random.Generator,
    metric: Metric,
    guarded: Metric,
    watch: WatchConfig,
    *,
    harm: float,
    tests: int,
    users: int,
    sessions: int,
) -> Ends:
    """Tests by the rule of a config (``watching.look``), looked at after every session.

    guarded: what its one guardrail watches, which is the same in both arms.
    """
    (guard,) = watch.guardrails
    sign = 1 if guard.harm == "up" else -1
    level = watch.guardrail_alpha
    counts = dict.fromkeys(("worse", "proven", "open", "few"), 0)
    size = dict(tests=tests, users=users, sessions=sessions, share=watch.share)
    for stream in simulate.streams(rng, metric, factor=1 - harm / metric.mean, **size):
        habits = guarded.users(rng, users, 1.0)
        seconds = sign * guarded.sessions(rng, habits[stream.user])
        # harm is what the bound is above: lowered by what is allowed, it is above 0
        seconds = seconds - guard.allowed * stream.treated
        guards = simulate.by_user(dataclasses.replace(stream, value=seconds))
        below = lambda v: sequential.radius_below(v, guard.scale, level)  # noqa: E731
        around = lambda v: sequential.radius(v, watch.scale, watch.alpha)  # noqa: E731
        least, one_sided = watch.least_users, dict(one_sided=True)
        lower = simulate.by_user(dataclasses.replace(stream, value=-stream.value))
        worse = _beyond(lower, least, around, **one_sided) | _beyond(
            guards, least, below, **one_sided
        )
        # the lower end is above -margin
        lifted = stream.value + watch.margin * stream.treated
        arms = simulate.by_user(dataclasses.replace(stream, value=lifted))
        proven = _beyond(arms, least, around, **one_sided)
        decided = worse | proven
        if decided.any():
            first = int(np.argmax(decided))
            counts["worse" if worse[first] else "proven"] += 1
        else:
            enough = min(arm.count[-1] for arm in arms) >= least
            counts["open" if enough else "few"] += 1
    return Ends(harm, users, sessions, tests, **{k: n / tests for k, n in counts.items()})


@dataclasses.dataclass(frozen=True)
class Alarms:
    """Alarms of a monitor's chart in so many sessions."""

    chart: str
    metric: str
    tests: int
    sessions: int
    # Share of tests with an alarm though nothing changed, and after a shift of half a standard
    # deviation; sessions until the latter, median.
    wrong: float
    found: float
    delay: float


def charts(rng: np.random.Generator, metric: Metric, *, tests: int, sessions: int) -> list[Alarms]:
    """False alarms and delays of each chart with its defaults. Users come at random, so that a
    monitor sees sessions of people with habits, as it does in a cycle.
    """
    rows = []
    for name, chart in monitors.CHARTS.items():
        wrong, delays = 0, []
        for stream in simulate.streams(rng, metric, tests=tests, users=400, sessions=2 * sessions):
            before = stream.value[~stream.treated]
            values = stream.value[stream.treated]
            z = monitors.standard(before, values)
            wrong += max(chart().path(z).max(), chart().path(-z).max()) > 1
            path = chart().path(_shifted(rng, metric, before, values))
            if path.max() > 1:
                delays.append(int(np.argmax(path > 1)) + 1)
        delay = float(np.median(delays)) if delays else float("inf")
        rows.append(
            Alarms(name, metric.name, tests, sessions, wrong / tests, len(delays) / tests, delay)
        )
    return rows


def _beyond(
    arms: Arms,
    least: int,
    radius: Callable[[Float64[np.ndarray, " n"]], Float64[np.ndarray, " n"]],
    one_sided: bool = False,
) -> Bool[np.ndarray, " n"]:
    """True if the difference of the arms is outside the radius, at each look that has enough."""
    control, treated = arms
    enough = np.minimum(control.count, treated.count) >= least
    apart = np.zeros(enough.size)
    variance = np.ones(enough.size)
    apart[enough] = (treated.mean - control.mean)[enough]
    variance[enough] = (control.variance + treated.variance)[enough]
    return enough & ((apart if one_sided else np.abs(apart)) > radius(variance))


def _shifted(
    rng: np.random.Generator,
    metric: Metric,
    before: Float64[np.ndarray, " n"],
    values: Float64[np.ndarray, " m"],
) -> Float64[np.ndarray, " m"]:
    """Standard values after a shift up by half a standard deviation: of the values themselves, or
    of the chance of a 1.
    """
    shift = 0.5 * before.std(ddof=1)
    if metric.within is None:
        # as many zeros become ones as it takes
        chance = shift / (1 - before.mean())
        moved = np.maximum(values, rng.random(values.size) < chance)
    else:
        moved = values + shift
    return monitors.standard(before, moved)


def _mean_of_sessions(
    rng: np.random.Generator, metric: Metric, means: Float64[np.ndarray, " users"], sessions: int
) -> Float64[np.ndarray, " users"]:
    """The mean of each user's sessions."""
    if metric.within is None:
        return rng.binomial(sessions, np.clip(means, 0, 1)) / sessions
    return rng.normal(means, metric.within / np.sqrt(sessions))
