"""Results of the study of the A/B test: tables, and a figure of three panels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.table

from experiments.ab.study import ALPHA, Alarms, Delay, Ends, Power, Rejections
from experiments.report import figure, table


def tables(
    same: Sequence[Rejections],
    powers: Sequence[Power],
    delays: Sequence[Delay],
    alarms: Sequence[Alarms],
    shipped: Sequence[Ends],
) -> Iterator[rich.table.Table]:
    """The tables of docs/realtime.md."""
    columns = ["A/A tests that reject", "metric", "users with candidate", "rejected"]
    rows = [(x.reader, x.metric, f"{x.share:.0%}", x.rate.told(".1%")) for x in same]
    yield table(columns, rows, texts=2)
    columns = ["metric", "effect", "users for power 50 %", "80 %", "90 %", "80 %, one look"]
    yield table(columns, [(x.metric, f"{x.effect:+.0%}", *_needed(x)) for x in powers])
    columns = ["harm", "rolled back", "candidate's sessions, median", "95 %", "users, median"]
    yield table(columns, [(f"{-x.effect:.0%}", *_until(x)) for x in delays])
    columns = ["chart", "metric", "false alarms", "found after a shift", "sessions, median"]
    rows = [
        (x.chart, x.metric, f"{x.wrong:.1%}", f"{x.found:.1%}", _count(x.delay)) for x in alarms
    ]
    yield table(columns, rows, texts=2)
    columns = ["harm", "sessions", "rolled back", "too few users", "promoted by proof", "open"]
    rows = []
    for x in shipped:
        shares = (x.worse, x.few, x.proven, x.open)
        rows.append((f"{0 - x.harm:g}", f"{x.sessions:,}", *(f"{share:.1%}" for share in shares)))
    yield table(columns, rows)


def draw(
    same: Sequence[Rejections],
    powers: Sequence[Power],
    delays: Sequence[Delay],
    sessions: int,
    path: Path,
) -> None:
    """Wrong alarms against the sessions looked at, power against users, sessions to a rollback."""
    first = same[0]
    with figure(path, 14, 4.2, 1, 1, 1) as (wrong, right, soon):
        for one in same:
            is_shown = (one.metric, one.share) == (first.metric, first.share)
            if is_shown and "one look" not in one.reader:
                _steps(wrong, [*one.at, sessions], one.at.size, one.tests, one.reader)
        wrong.axhline(100 * ALPHA, color="grey", linewidth=1, linestyle=":", label="level")
        wrong.set(xlabel="sessions, with a look after each", xlim=(100, sessions), ylim=(0, None))
        wrong.set(ylabel="A/A tests that have rejected, %", title=f"Wrong alarms ({first.metric})")
        for number, one in enumerate(powers):
            for seen, how, line in ((one.seen, "looked at always", "-"), (one.once, "once", "--")):
                label, color = f"{one.metric}, {how}", f"C{number}"
                right.plot(one.users, 100 * seen, color=color, linestyle=line, label=label)
        right.set(xlabel="users of both arms", ylabel="tests that see it, %", ylim=(0, 102))
        right.set(title=f"Power for an effect of {powers[0].effect:.0%}")
        for one in delays:
            _steps(soon, one.sessions, one.sessions.size, one.tests, f"{-one.effect:.0%}")
        soon.set(xlabel="sessions that the candidate had", ylabel="rolled back, %", ylim=(0, 102))
        soon.set(title="Time to a rollback, by harm")
        for axis in (wrong, right, soon):
            axis.set(xscale="log")


def _steps(axis: Any, at: Sequence[float], found: int, tests: int, label: str) -> None:
    """Draws the share of the tests of which something has been found, by the session."""
    count = np.minimum(np.arange(len(at)) + 1, found)
    axis.step(at, 100 * count / tests, where="post", label=label)


def _needed(one: Power) -> list[str]:
    """Users for a power of 50, 80 and 90 %, looked at always, and for 80 % with one look."""
    always = [one.needed(power, one.seen) for power in (0.5, 0.8, 0.9)]
    return [_count(users) for users in (*always, one.needed(0.8, one.once))]


def _until(one: Delay) -> list[str]:
    """Share rolled back; sessions until then, their median and 95 % quantile; users, median."""
    share = f"{one.sessions.size / one.tests:.1%}"
    if not one.sessions.size:
        return [share, "", "", ""]
    counts = (*np.percentile(one.sessions, (50, 95)), np.median(one.users))
    return [share, *(f"{value:,.0f}" for value in counts)]


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "more"
