"""A run of the agent's cycle: each checkpoint beside a copy that never changes.

True satisfaction is read from the file that simulated people keep for themselves
(``realtime.satisfaction``), after the run.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import rich.table

from experiments.report import AFTER, BEFORE, Estimate, band, figure, table
from people.feedback.database import make_engine
from people.feedback.records import EVENTS, AnswerRecord
from people.feedback.rewards.answered import answered
from people.feedback.rewards.combine import FeedbackRewardConfig, make_reward
from people.feedback.store import FeedbackStore
from people.realtime import sequential
from people.realtime.ledger import Ledger
from people.realtime.recorded import Joined, sessions_of
from people.realtime.satisfaction import Rewarded, TruthFile, correlation, turns_of
from people.realtime.served import TRUTH
from people.realtime.served_store import rewarded
from people.realtime.tables import CYCLES, EDGES, VERSIONS

# Metric -> its name in tables, and whether more is better.
METRICS: Mapping[str, tuple[str, bool]] = {
    "reward/retention": ("edits that persist", True),
    "reward/follow_up": ("dissatisfied follow-ups", True),
    "latency": ("s to the first token", False),
    "reward": ("reward", True),
}
_Z = 1.96
# Intervals of fewer sessions of an arm say nothing.
_LEAST = 12


@dataclasses.dataclass(frozen=True)
class Period:
    """One cycle, by the reactions of its people."""

    cycle: int
    # The version that was deployed, how the cycle ended, and why.
    version: int
    state: str
    why: str
    # Metric -> per-user mean of the deployed version, and of the copy that never changes.
    deployed: Mapping[str, Estimate]
    control: Mapping[str, Estimate]
    sessions: tuple[int, int]
    # True satisfaction of turns of both, and its correlation with the reward of their answers.
    satisfaction: tuple[Estimate, Estimate]
    correlation: Estimate


def read(folder: Path, anchor: int = 0) -> list[Period]:
    """The cycles of a workdir, in order, but the newest until both arms have some sessions in it.
    anchor: the version that never changes.
    """
    engine = make_engine(f"sqlite:///{folder / 'people.db'}", new=False)
    reward = make_reward(FeedbackRewardConfig())
    with FeedbackStore(engine) as store:
        ledger = Ledger(engine)
        rows = list(ledger.rows(CYCLES))
        reasons = {
            one.cycle: one.reason
            for one in ledger.rows(EDGES)
            if one.before not in ("promote", "roll_back")
        }
        versions = {anchor, *(row.base for row in rows)}
        joined = store.joined(store.routed(sorted(versions), 0.0))
        rewards = {one.answer.id: reward(one).total for one in answered(joined)}
        truth = TruthFile(folder / TRUTH).turns()
        found = []
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            end = math.inf if following is None else following.began_at
            within = [one for one in joined if row.began_at <= one[0].asked_at < end]
            base = [one for one in within if one[0].version == row.base]
            copies = [one for one in within if one[0].version == anchor]
            arms = [_of_users(one, reward) for one in (base, copies)]
            if min(number for _, number in arms) < _LEAST:
                continue
            paid = [[_paid(each, rewards) for each, _ in one] for one in (base, copies)]
            turns = [turns_of(one, truth) for one in paid]
            found.append(
                Period(
                    cycle=row.number,
                    version=row.base,
                    state=row.state,
                    why=reasons.get(row.number, ""),
                    deployed=arms[0][0],
                    control=arms[1][0],
                    sessions=(arms[0][1], arms[1][1]),
                    satisfaction=(_mean(turns[0][:, 0]), _mean(turns[1][:, 0])),
                    correlation=Estimate(*correlation(np.concatenate(turns))),
                )
            )
        return found


def senders(folder: Path) -> rich.table.Table:
    """Count the events of each kind that came."""
    engine = make_engine(f"sqlite:///{folder / 'people.db'}", new=False)
    with FeedbackStore(engine) as store:
        answers = store.of_sessions(None, 0.0)
        kinds = collections.Counter(
            event.kind for _, events in store.joined(answers) for event in events
        )
    rows = [[kind, str(kinds[kind])] for kind in EVENTS]
    return table(["event", "received"], rows, f"{len(answers)} answers")


def versions(folder: Path) -> rich.table.Table:
    """Each version by the knowledge of people alone, those that were rolled back too: of the turns
    that the router gave it, the share that was right, and true satisfaction.
    """
    engine = make_engine(f"sqlite:///{folder / 'people.db'}", new=False)
    truth = TruthFile(folder / TRUTH).turns()
    turns: dict[int, dict[str, tuple[float, float]]] = collections.defaultdict(dict)
    with FeedbackStore(engine) as store:
        known = [row.version for row in Ledger(engine).rows(VERSIONS)]
        for answer, _ in store.joined(store.routed(known, 0.0)):
            if answer.id in truth:
                one = truth[answer.id]
                turns[answer.version][one.name] = one.right, one.satisfaction
    rows = []
    for version, found in sorted(turns.items()):
        values = np.array(list(found.values()))
        means = [_mean(values[:, i]).told(form) for i, form in ((0, ".1%"), (1, ".3f"))]
        rows.append([str(version), str(len(found)), *means])
    columns = ["version", "turns", "right", "satisfied"]
    return table(columns, rows, "by what people keep to themselves; 95 % intervals over turns")


def differences(periods: Sequence[Period], anchor: int = 0) -> rich.table.Table:
    """Each checkpoint against the copy that never changes, in the same time."""
    rows = []
    for one in periods:
        cells = ["the copy itself"] * len(METRICS)
        if one.version != anchor:
            cells = [_difference(one, name).told("+.3f") for name in METRICS]
        content = [f"{each.mean:.2f}" for each in one.satisfaction]
        arms = f"{one.sessions[0]} + {one.sessions[1]}"
        told = (str(one.cycle), str(one.version), one.state, arms)
        rows.append([*told, *cells, " / ".join(content), one.correlation.told(".2f")])
    columns = ["cycle", "version", "ended", "sessions", *(told for told, _ in METRICS.values())]
    caption = (
        "deployed minus the copy, per user, with 95 % intervals; follow-ups as the reward has them "
        "(0 for none, down to -1); true satisfaction of both; its correlation with the reward"
    )
    return table([*columns, "satisfied", "correlation"], rows, caption, texts=3)


def draw(periods: Sequence[Period], path: Path) -> None:
    """Metrics over checkpoints, both arms, and the correlation of reward and satisfaction."""
    cycles = [one.cycle for one in periods]
    with figure(path, 15.0, 3.6, 1, 1, 1, 1) as axes:
        for axis, name in zip(axes, list(METRICS)[:3], strict=False):
            for color, label in ((AFTER, "deployed"), (BEFORE, "control")):
                each = [getattr(one, label)[name] for one in periods]
                shown = "deployed" if label == "deployed" else "a copy that never changes"
                band(axis, cycles, _stacked(each), color=color, label=shown)
            axis.set(xlabel="cycle", title=METRICS[name][0])
        last = axes[3]
        band(last, cycles, _stacked([one.correlation for one in periods]), color=AFTER)
        last.set(xlabel="cycle", title="correlation of reward and true satisfaction", ylim=(-1, 1))


def _of_users(joined: Joined, reward) -> tuple[dict[str, Estimate], int]:
    """Metric -> mean over users, and the number of sessions."""
    if not joined:
        return {name: Estimate(math.nan, math.nan, math.nan) for name in METRICS}, 0
    sessions = sessions_of(joined, lambda given: rewarded(reward, given))
    found = {}
    for name in METRICS:
        arm = sequential.arm(sessions.user, sessions.metric(name))
        found[name] = _interval(arm.mean, arm.variance)
    return found, len(sessions.session)


def _paid(answer: AnswerRecord, rewards: Mapping[str, float]) -> Rewarded:
    return Rewarded(answer.id, answer.version, answer.asked_at, rewards[answer.id])


def _difference(period: Period, name: str) -> Estimate:
    """Deployed minus the copy."""
    one, other = period.deployed[name], period.control[name]
    variance = ((one.high - one.low) ** 2 + (other.high - other.low) ** 2) / (2 * _Z) ** 2
    return _interval(one.mean - other.mean, variance)


def _mean(values: np.ndarray) -> Estimate:
    if not len(values):
        return Estimate(math.nan, math.nan, math.nan)
    return _interval(float(values.mean()), float(values.var()) / len(values))


def _interval(mean: float, variance: float) -> Estimate:
    half = _Z * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half)


def _stacked(each: Sequence[Estimate]) -> Estimate:
    ends = np.array([(one.mean, one.low, one.high) for one in each], np.float64).reshape(-1, 3)
    return Estimate(*ends.T)
