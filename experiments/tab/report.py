"""Results of Tab runs: accepts and suggestions shown, first steps against last; calibration;
where nothing is shown any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib.axes
import numpy as np
import rich.table
from matplotlib.figure import Figure

from experiments.tab.asked import PAID
from experiments.tab.metrics import Shown, shown
from rl_code.store.store import GroupStore
from rl_code.tasks import infill
from rl_code.types import Task
from rl_code.workdir import STORE

THRESHOLD = PAID.threshold
_BINS = 8
_REPEATS = 2_000
# The first and the last steps are a fifth of all, and at most so many, since the policy changes.
_MOST = 24
# Steps over which a curve is averaged.
_WINDOW = 10
_BEFORE, _AFTER, _BOUND = "#8a8f98", "#1f5fa8", "#c0392b"


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
    before, _ = infill.around(task)
    said = "silent" if infill.is_silent(task) else "stated" if task.meta["stated"] else "open"
    return f"{said}, {'line' if not before.rpartition('\n')[2].strip() else 'rest'}"


def groups(run: Path, number: int = 0) -> Iterator[Played]:
    """The groups that a run was trained on."""
    store = GroupStore(run / STORE)
    for step in store.consumed():
        for item in store.items(step):
            if item.kind == "train":
                group = store.record(step, item.number).group
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


def table(found: Sequence[Played]) -> rich.table.Table:
    """One line each for shown, accepted and the rate; the change is relative, with its 95 %
    interval (a bootstrap over groups) and that of each run.
    """
    before, after, steps = periods(found)
    rng = np.random.default_rng(0)
    draws = [shares(after, rng) / np.maximum(shares(before, rng), 1e-9) for _ in range(_REPEATS)]
    low, high = np.quantile(100 * (np.array(draws) - 1), [0.025, 0.975], axis=0)
    first, last = shares(before), shares(after)
    each = [_change(found, run) for run in sorted({one.run for one in found})]
    view = rich.table.Table()
    view.add_column("%")
    for name in (f"first {steps} steps", f"last {steps} steps", "change", "of each run"):
        view.add_column(name, justify="right")
    for i, name in enumerate(("episodes that show", "episodes accepted", "accepted of shown")):
        change = 100 * (last[i] / max(first[i], 1e-9) - 1)
        told = f"{change:+.0f} % [{low[i]:+.0f}, {high[i]:+.0f}]"
        runs = ", ".join(f"{change[i]:+.0f}" for change in each)
        view.add_row(name, f"{first[i]:.1f}", f"{last[i]:.1f}", told, runs)
    return view


def _change(found: Sequence[Played], run: int) -> np.ndarray:
    """[3], the relative changes of one run in %."""
    before, after, _ = periods([one for one in found if one.run == run])
    return 100 * (shares(after) / np.maximum(shares(before), 1e-9) - 1)


def kinds(found: Sequence[Played]) -> rich.table.Table:
    """Suggestions shown and accepted by the view at the hole, first steps against last."""
    before, after, _ = periods(found)
    view = rich.table.Table(caption="accepted: of those that were shown")
    view.add_column("comment, hole")
    for name in ("episodes", "shown first", "shown last", "accepted first", "accepted last"):
        view.add_column(name, justify="right")
    for name in sorted({one.kind for one in found}):
        a, b = ([g for g in part if g.kind == name] for part in (before, after))
        if a and b:
            first, last = shares(a), shares(b)
            episodes = str(sum(len(g.shown) for g in (*a, *b)))
            rates = (f"{x:.1f} %" for x in (first[0], last[0], first[2], last[2]))
            view.add_row(name, episodes, *rates)
    return view


def draw(found: Sequence[Played], path: Path) -> None:
    """Three panels: shares by step; acceptance by confidence, with the threshold at 25 %; the share
    shown by the chance of acceptance, for each kind of hole.
    """
    figure = Figure(figsize=(12.6, 4), layout="constrained")
    curves, calibration, threshold = figure.subplots(1, 3)
    before, after, _ = periods(found)
    _draw_curves(curves, found)
    _draw_calibration(calibration, before, after)
    _draw_kinds(threshold, found, before, after)
    figure.savefig(path, dpi=110)


def _draw_curves(axis: matplotlib.axes.Axes, found: Sequence[Played]) -> None:
    runs = sorted({one.run for one in found})
    steps = sorted({one.step for one in found})
    window = max(1, min(_WINDOW, len(steps) // 5))
    middle = [steps[i + window // 2] for i in range(0, len(steps) - window + 1, window)]
    for place, (name, color) in enumerate((("shown", _BEFORE), ("accepted", _AFTER))):
        values = np.full((len(runs), len(middle)), np.nan)
        for row, run in enumerate(runs):
            for i in range(len(middle)):
                chosen = set(steps[i * window : (i + 1) * window])
                part = [g for g in found if g.run == run and g.step in chosen]
                if part:
                    values[row, i] = shares(part)[place]
        axis.plot(middle, np.nanmean(values, axis=0), color=color, label=f"{name} (mean)")
        axis.fill_between(
            middle, np.nanmin(values, axis=0), np.nanmax(values, axis=0), color=color, alpha=0.2
        )
    axis.set(ylim=(0, 100), xlabel="step", ylabel="of 100 episodes")
    axis.set_title(f"{len(runs)} runs; the band is their range", fontsize=10)
    axis.legend(frameon=False)


def _draw_calibration(
    axis: matplotlib.axes.Axes, before: Sequence[Played], after: Sequence[Played]
) -> None:
    axis.axhline(THRESHOLD, color=_BOUND, linestyle="--", linewidth=1)
    axis.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    for name, part, color in (("first steps", before, _BEFORE), ("last steps", after, _AFTER)):
        ones = [one for group in part for one in group.shown if one is not None]
        label = f"{name}: {len(ones)} shown"
        if len(ones) < _BINS:
            axis.plot([], [], "o", color=color, label=label)
            continue
        confidence = np.array([one.confidence for one in ones])
        accepted = np.array([one.accepted for one in ones])
        for i, bin_ in enumerate(np.array_split(np.argsort(confidence), _BINS)):
            axis.errorbar(
                confidence[bin_].mean(), accepted[bin_].mean(), yerr=_error(accepted[bin_]),
                fmt="o", color=color, capsize=2, label=None if i else label,
            )  # fmt: skip
    axis.set(xlim=(0, 1), ylim=(0, 1), ylabel="share accepted (pays above 25 %)")
    axis.set(xlabel="confidence (geometric mean over tokens)")
    axis.legend(frameon=False, loc="upper left", fontsize=8)


def _draw_kinds(
    axis: matplotlib.axes.Axes,
    found: Sequence[Played],
    before: Sequence[Played],
    after: Sequence[Played],
) -> None:
    axis.axvline(THRESHOLD, color=_BOUND, linestyle="--", linewidth=1)
    for name in sorted({one.kind for one in found}):
        a, b = ([g for g in part if g.kind == name] for part in (before, after))
        if not (a and b):
            continue
        # where next to nothing is shown in the last steps, no rate can be told of them alone
        rate = shares([g for g in found if g.kind == name])[2] / 100
        first, last = shares(a)[0] / 100, shares(b)[0] / 100
        axis.plot([rate, rate], [first, last], color="0.8", linewidth=1)
        axis.plot(rate, first, "o", color=_BEFORE)
        axis.plot(rate, last, "o", color=_AFTER)
        axis.annotate(name, (rate, last), xytext=(4, -10), textcoords="offset points", fontsize=7)
    axis.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="share accepted of what is shown there")
    axis.set(ylabel="share of episodes that show")
    axis.set_title("by comment and hole; grey: first, blue: last steps", fontsize=10)


def _error(accepted: np.ndarray) -> float:
    """Half of the 95 % interval of a share."""
    share = accepted.mean()
    return 1.96 * np.sqrt(max(share * (1 - share), 0.25 / len(accepted)) / len(accepted))
