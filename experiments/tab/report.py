"""Results of Tab runs: accepts and suggestions shown, first steps against last; calibration;
where nothing is shown any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.table

from experiments.report import AFTER, BEFORE, BOUND, Estimate, band, calibration, figure, table
from experiments.runs import trained
from experiments.tab.asked import PAID
from experiments.tab.metrics import Shown, shown
from rl_code.environment.tools.suggest import around
from rl_code.tasks import infill
from rl_code.types import Task

THRESHOLD = PAID.threshold
_REPEATS = 2_000
# The first and the last steps are a fifth of all, and at most so many, since the policy changes.
_MOST = 24
# Steps over which a curve is averaged.
_WINDOW = 10


@dataclasses.dataclass(frozen=True)
class Played:
    """One group: the episodes at one hole."""

    # Where it stands: the number of its run among those that are reported, and the step.
    run: int
    step: int
    # What can be seen at the hole, see ``kind``.
    kind: str
    # What each episode showed; None for nothing.
    shown: tuple[Shown | None, ...]

    @property
    def accepted(self) -> int:
        """Number of episodes that were accepted."""
        return sum(one is not None and one.accepted for one in self.shown)


def kind(task: Task) -> str:
    """The view at a hole: what the comment says, and how much of the line is missing."""
    before, _ = around(task)
    said = "silent" if infill.is_silent(task) else "stated" if task.meta["stated"] else "open"
    return f"{said}, {'line' if not before.rpartition('\n')[2].strip() else 'rest'}"


def groups(run: Path, number: int = 0) -> Iterator[Played]:
    """The groups that a run was trained on."""
    for step, group in trained(run):
        each = tuple(shown(group, one) for one in group.trajectories)
        yield Played(number, step, kind(group.task), each)


def periods(found: Sequence[Played]) -> tuple[list[Played], list[Played], int]:
    """The groups of the first and of the last steps, and how many steps that is."""
    steps = sorted({one.step for one in found})
    part = max(1, min(_MOST, len(steps) // 5))
    first, last = set(steps[:part]), set(steps[-part:])
    return [g for g in found if g.step in first], [g for g in found if g.step in last], part


def shares(found: Sequence[Played], rng: np.random.Generator | None = None) -> np.ndarray:
    """[3], shown and accepted per 100 episodes, and accepted per 100 shown; of groups drawn with
    replacement within their run where there is a generator: those of one group are alike.
    """
    counts = np.array([[g.run, len(g.shown), _count(g), g.accepted] for g in found])
    if rng is not None:
        parts = [np.flatnonzero(counts[:, 0] == run) for run in np.unique(counts[:, 0])]
        counts = counts[np.concatenate([rng.choice(part, len(part)) for part in parts])]
    _, episodes, shown_, accepted = counts.sum(axis=0)
    return 100 * np.array([shown_ / episodes, accepted / episodes, accepted / max(shown_, 1)])


def _count(group: Played) -> int:
    return sum(one is not None for one in group.shown)


def changes(found: Sequence[Played]) -> rich.table.Table:
    """One line each for shown, accepted and the rate; the change is relative, with its 95 %
    interval (a bootstrap over groups) and that of each run.
    """
    before, after, steps = periods(found)
    rng = np.random.default_rng(0)
    drawn = [_ratio(shares(before, rng), shares(after, rng)) for _ in range(_REPEATS)]
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    first, last = shares(before), shares(after)
    each = []
    for run in sorted({one.run for one in found}):
        begin, end, _ = periods([one for one in found if one.run == run])
        each.append(_ratio(shares(begin), shares(end)))
    rows = []
    for i, name in enumerate(("episodes that show", "episodes accepted", "accepted of shown")):
        change = f"{_ratio(first, last)[i]:+.0f} % [{low[i]:+.0f}, {high[i]:+.0f}]"
        runs = ", ".join(f"{change[i]:+.0f}" for change in each)
        rows.append((name, f"{first[i]:.1f}", f"{last[i]:.1f}", change, runs))
    columns = ["%", f"first {steps} steps", f"last {steps} steps", "change", "of each run"]
    return table(columns, rows)


def _ratio(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Relative changes in %."""
    return 100 * (after / np.maximum(before, 1e-9) - 1)


def by_kind(found: Sequence[Played]) -> Iterator[tuple[str, list[Played], list[Played]]]:
    """Kinds of holes that both periods have, with their groups of the first and last steps."""
    before, after, _ = periods(found)
    for name in sorted({one.kind for one in found}):
        first, last = ([g for g in part if g.kind == name] for part in (before, after))
        if first and last:
            yield name, first, last


def kinds(found: Sequence[Played]) -> rich.table.Table:
    """Suggestions shown and accepted by the view at the hole, first steps against last."""
    rows = []
    for name, first, last in by_kind(found):
        a, b = shares(first), shares(last)
        episodes = str(sum(len(group.shown) for group in (*first, *last)))
        rows.append((name, episodes, *(f"{x:.1f} %" for x in (a[0], b[0], a[2], b[2]))))
    columns = ["shown first", "shown last", "accepted first", "accepted last"]
    caption = "accepted: of those that were shown"
    return table(["comment, hole", "episodes", *columns], rows, caption)


def draw(found: Sequence[Played], path: Path) -> None:
    """Three panels: shares by step; acceptance by confidence, with the threshold at 25 %; the share
    shown by the chance of acceptance, for each kind of hole.
    """
    with figure(path, 12.6, 4, 1, 1, 1) as (curves, calibrated, threshold):
        _draw_curves(curves, found)
        _draw_calibration(calibrated, found)
        _draw_kinds(threshold, found)


def _draw_curves(axis: Any, found: Sequence[Played]) -> None:
    runs = sorted({one.run for one in found})
    steps = sorted({one.step for one in found})
    window = max(1, min(_WINDOW, len(steps) // 5))
    parts = [steps[i : i + window] for i in range(0, len(steps) - window + 1, window)]
    values = np.full((2, len(runs), len(parts)), np.nan)
    for row, run in enumerate(runs):
        for i, part in enumerate(parts):
            groups = [g for g in found if g.run == run and g.step in part]
            if groups:
                values[:, row, i] = shares(groups)[:2]
    middle = [part[window // 2] for part in parts]
    for name, color, each in zip(("shown", "accepted"), (BEFORE, AFTER), values, strict=True):
        ends = Estimate(np.nanmean(each, 0), np.nanmin(each, 0), np.nanmax(each, 0))
        band(axis, middle, ends, color=color, label=f"{name} (mean)")
    axis.set(ylim=(0, 100), xlabel="step", ylabel="of 100 episodes")
    axis.set(title=f"{len(runs)} runs; the band is their range")


def _draw_calibration(axis: Any, found: Sequence[Played]) -> None:
    axis.axhline(THRESHOLD, color=BOUND, linestyle="--", linewidth=1)
    axis.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    before, after, _ = periods(found)
    for name, part, color in (("first steps", before, BEFORE), ("last steps", after, AFTER)):
        ones = [one for group in part for one in group.shown if one is not None]
        confidence = np.array([one.confidence for one in ones])
        accepted = np.array([one.accepted for one in ones])
        label = f"{name}: {len(ones)} shown"
        calibration(axis, confidence, accepted, color=color, label=label)
    axis.set(xlim=(0, 1), ylim=(0, 1), ylabel="share accepted (pays above 25 %)")
    axis.set(xlabel="confidence (geometric mean over tokens)")


def _draw_kinds(axis: Any, found: Sequence[Played]) -> None:
    axis.axvline(THRESHOLD, color=BOUND, linestyle="--", linewidth=1)
    for name, before, after in by_kind(found):
        # where next to nothing is shown in the last steps, no rate can be told of them alone
        rate = shares([g for g in found if g.kind == name])[2] / 100
        first, last = shares(before)[0] / 100, shares(after)[0] / 100
        axis.plot([rate, rate], [first, last], color="0.8", linewidth=1)
        axis.plot(rate, first, "o", color=BEFORE)
        axis.plot(rate, last, "o", color=AFTER)
        axis.annotate(name, (rate, last), xytext=(4, -10), textcoords="offset points", fontsize=7)
    axis.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="share accepted of what is shown there")
    axis.set(ylabel="share of episodes that show")
    axis.set(title="by comment and hole; grey: first, blue: last steps")
