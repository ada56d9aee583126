"""Results of the study of the A/B test: tables, and a figure of three panels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.ab.study import ALPHA, Alarms, Delay, Ends, Power, Rejections


def markdown(
    same: Sequence[Rejections],
    powers: Sequence[Power],
    delays: Sequence[Delay],
    alarms: Sequence[Alarms],
    shipped: Sequence[Ends],
) -> str:
    """The tables as docs/realtime.md has them."""
    lines = ["| A/A tests that reject, % | metric | users with candidate | share |"]
    lines.append("|---|---|---|---|")
    for one in same:
        rate = one.rate
        lines.append(
            f"| {one.reader} | {one.metric} | {100 * one.share:.0f} % | {100 * rate.mean:.1f} "
            f"[{100 * rate.low:.1f}, {100 * rate.high:.1f}] |"
        )
    lines += ["", "| metric | effect | users for power 50 % | 80 % | 90 % | 80 %, one look |"]
    lines.append("|---|---|---|---|---|---|")
    for one in powers:
        needed = [one.needed(share, one.seen) for share in (0.5, 0.8, 0.9)]
        needed.append(one.needed(0.8, one.once))
        cells = " | ".join(_count(value) for value in needed)
        lines.append(f"| {one.metric} | {100 * one.effect:+.0f} % | {cells} |")
    lines += ["", "| harm | rolled back | candidate's sessions, median | 95 % | users, median |"]
    lines.append("|---|---|---|---|---|")
    for one in delays:
        share = one.sessions.size / one.tests
        cells = ["", "", ""]
        if one.sessions.size:
            middle, most = np.percentile(one.sessions, (50, 95))
            cells = [f"{middle:,.0f}", f"{most:,.0f}", f"{np.median(one.users):,.0f}"]
        lines.append(f"| {-100 * one.effect:.0f} % | {100 * share:.1f} % | {' | '.join(cells)} |")
    lines += ["", "| chart | metric | false alarms | found after a shift | sessions, median |"]
    lines.append("|---|---|---|---|---|")
    for one in alarms:
        lines.append(
            f"| {one.chart} | {one.metric} | {100 * one.wrong:.1f} % | {100 * one.found:.1f} % | "
            f"{_count(one.delay)} |"
        )
    lines += ["", "| harm | sessions | rolled back | too few users | promoted by proof | open |"]
    lines.append("|---|---|---|---|---|---|")
    for one in shipped:
        shares = (one.worse, one.few, one.proven, one.open)
        cells = " | ".join(f"{100 * share:.1f} %" for share in shares)
        lines.append(f"| {0 - one.harm:g} | {one.sessions:,} | {cells} |")
    return "\n".join(lines)


def draw(
    same: Sequence[Rejections],
    powers: Sequence[Power],
    delays: Sequence[Delay],
    sessions: int,
    path: Path,
) -> None:
    """Wrong alarms against the sessions looked at, power against users, sessions to a rollback."""
    import matplotlib  # slow to import, and only the end draws

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (wrong, right, soon) = pyplot.subplots(1, 3, figsize=(14, 4.2))
    first = same[0]
    shown = (x for x in same if (x.metric, x.share) == (first.metric, first.share))
    for one in shown:
        if "one look" in one.reader:
            continue
        at = np.concatenate((one.at, [sessions]))
        share = np.concatenate((np.arange(1, one.at.size + 1), [one.at.size])) / one.tests
        wrong.step(at, 100 * share, where="post", label=one.reader)
    wrong.axhline(100 * ALPHA, color="grey", linewidth=1, linestyle=":", label="level")
    wrong.set(
        xlabel="sessions, with a look after each",
        ylabel="A/A tests that have rejected, %",
        title=f"Wrong alarms ({first.metric})",
        xscale="log",
        xlim=(100, sessions),
        ylim=(0, None),
    )
    wrong.legend(frameon=False, fontsize="small")
    for number, one in enumerate(powers):
        label = f"{one.metric}, looked at always"
        right.plot(one.users, 100 * one.seen, color=f"C{number}", label=label)
        label = f"{one.metric}, once"
        right.plot(one.users, 100 * one.once, color=f"C{number}", linestyle="--", label=label)
    right.set(
        xlabel="users of both arms",
        ylabel="tests that see it, %",
        title=f"Power for an effect of {100 * powers[0].effect:.0f} %",
        xscale="log",
        ylim=(0, 102),
    )
    right.legend(frameon=False, fontsize="small")
    for one in delays:
        share = 100 * np.arange(1, one.sessions.size + 1) / one.tests
        soon.step(one.sessions, share, where="post", label=f"{-100 * one.effect:.0f} %")
    soon.set(
        xlabel="sessions that the candidate had",
        ylabel="rolled back, %",
        title="Time to a rollback, by harm",
        xscale="log",
        ylim=(0, 102),
    )
    soon.legend(frameon=False, fontsize="small")
    for axis in (wrong, right, soon):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "more"
