"""The deployed version of each cycle against the copy that never changes, by what people did."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import rich.table

from experiments.report import Estimate, table
from people.feedback.database import make_engine
from people.feedback.rewards.answered import Answered, answered
from people.feedback.rewards.tab import Tab
from people.feedback.store import FeedbackStore
from people.realtime import sequential
from people.realtime.ledger import Ledger
from people.realtime.recorded import Joined, sessions_of
from people.realtime.tables import CYCLES

# Metrics of a session, and their columns.
METRICS = {"reward": "reward", "shown": "shown", "accepted": "taken of shown"}
_PAID = Tab()
_NOBODY = sequential.Arm(0, math.nan, math.nan)
_Z = 1.96


@dataclasses.dataclass(frozen=True)
class Period:
    """One cycle, by the reactions of its people."""

    cycle: int
    # The version that was deployed, and how the cycle ended.
    version: int
    state: str
    # Metric -> per-user mean of the deployed version, and of the copy.
    deployed: Mapping[str, sequential.Arm]
    copy: Mapping[str, sequential.Arm]
    # Sessions of both.
    sessions: tuple[int, int]


def read(folder: Path, anchor: int = 0) -> list[Period]:
    """The cycles of a workdir in which both arms have sessions, in order. anchor: the version that
    never changes.
    """
    engine = make_engine(f"sqlite:///{folder / 'people.db'}", new=False)
    with FeedbackStore(engine) as store:
        rows = list(Ledger(engine).rows(CYCLES))
        versions = {anchor, *(row.base for row in rows)}
        joined = store.joined(store.routed(sorted(versions), 0.0))
    found = []
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        end = math.inf if following is None else following.began_at
        within = [one for one in joined if row.began_at <= one[0].asked_at < end]
        arms = [
            _arm([one for one in within if one[0].version == version])
            for version in (row.base, anchor)
        ]
        (deployed, some), (copy, others) = arms
        if not some or not others:
            continue
        found.append(Period(row.number, row.base, row.state, deployed, copy, (some, others)))
    return found


def _arm(joined: Joined) -> tuple[dict[str, sequential.Arm], int]:
    """Metric -> mean over users, and the number of sessions."""
    sessions = sessions_of(joined, lambda given: [_measured(one) for one in answered(given)])
    known = {
        name: sequential.arm(sessions.user, sessions.values[name]) if joined else _NOBODY
        for name in METRICS
    }
    return known, len(sessions.session)


def _measured(one: Answered) -> dict[str, float]:
    seen = bool(one.first("shown") or one.first("accepted") or one.first("rejected"))
    return {"reward": _PAID(one), "shown": float(seen)}


def differences(periods: Sequence[Period], anchor: int = 0) -> rich.table.Table:
    """Each deployed version against the copy, in the same time."""
    rows = []
    for one in periods:
        cells = []
        for name in METRICS:
            mine, other = one.deployed[name], one.copy[name]
            told = f"{mine.mean:.3f}"
            if one.version != anchor:
                told = f"{told} / {other.mean:.3f}, {_difference(mine, other).told()}"
            cells.append(told)
        arms = f"{one.sessions[0]} + {one.sessions[1]}"
        rows.append([str(one.cycle), str(one.version), one.state, arms, *cells])
    caption = "deployed / copy, and their difference, per user, with 95 % intervals"
    columns = ["cycle", "version", "ended", "sessions", *METRICS.values()]
    return table(columns, rows, caption, texts=3)


def _difference(one: sequential.Arm, other: sequential.Arm) -> Estimate:
    mean, half = one.mean - other.mean, _Z * math.sqrt(one.variance + other.variance)
    return Estimate(mean, mean - half, mean + half)
