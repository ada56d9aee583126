"""What a Tab run came to: accepts and suggestions shown, first steps against last; calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import rich.table
from matplotlib.figure import Figure

from experiments.tab.asked import PAID
from experiments.tab.metrics import Shown, shown
from rl_code.store.store import GroupStore
from rl_code.workdir import STORE

THRESHOLD = PAID.threshold
_BINS = 8
_REPEATS = 2_000


def episodes(run: Path) -> Iterator[tuple[int, int, Shown | None]]:
    """(step, number of the group, what was shown) of all episodes that a run was trained on."""
    store = GroupStore(run / STORE)
    for step in store.consumed():
        for item in store.items(step):
            if item.kind == "train":
                group = store.record(step, item.number).group
                for trajectory in group.trajectories:
                    yield step, item.number, shown(group, trajectory)


class Period:
    """The episodes of some steps, by group: those of one group are alike."""

    def __init__(self, found: Sequence[tuple[int, int, Shown | None]]):
        groups: dict[tuple[int, int], list[Shown | None]] = {}
        for step, number, one in found:
            groups.setdefault((step, number), []).append(one)
        self.shown = [one for _, _, one in found if one is not None]
        self.counts = np.array([len(group) for group in groups.values()])
        self._shown = np.array([sum(o is not None for o in g) for g in groups.values()])
        self._accepted = np.array(
            [sum(o is not None and o.accepted for o in g) for g in groups.values()]
        )

    def shares(self, rng: np.random.Generator | None = None) -> np.ndarray:
        """[3], shown and accepted per 100 episodes, and accepted per 100 shown; of groups drawn
        with replacement where there is a generator.
        """
        count = len(self.counts)
        drawn = np.arange(count) if rng is None else rng.integers(count, size=count)
        episodes = self.counts[drawn].sum()
        shown_, accepted = self._shown[drawn].sum(), self._accepted[drawn].sum()
        return 100 * np.array([shown_ / episodes, accepted / episodes, accepted / max(shown_, 1)])


def table(before: Period, after: Period, steps: int) -> rich.table.Table:
    """One line each for shown, accepted and the rate; the change is relative, with its 95 %
    interval (a bootstrap over groups).
    """
    rng = np.random.default_rng(0)
    draws = [after.shares(rng) / np.maximum(before.shares(rng), 1e-9) for _ in range(_REPEATS)]
    low, high = np.quantile(100 * (np.array(draws) - 1), [0.025, 0.975], axis=0)
    first, last = before.shares(), after.shares()
    view = rich.table.Table()
    view.add_column("%")
    for name in (f"first {steps} steps", f"last {steps} steps", "change"):
        view.add_column(name, justify="right")
    for i, name in enumerate(("episodes that show", "episodes accepted", "accepted of shown")):
        change = 100 * (last[i] / max(first[i], 1e-9) - 1)
        told = f"{change:+.0f} % [{low[i]:+.0f}, {high[i]:+.0f}]"
        view.add_row(name, f"{first[i]:.1f}", f"{last[i]:.1f}", told)
    return view


def draw(before: Period, after: Period, path: Path) -> None:
    """Acceptance by the policy's confidence in what it shows, with the threshold at 25 %."""
    figure = Figure(figsize=(8.4, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    titled = (("first steps", before), ("last steps", after))
    for axis, (title, period) in zip(axes, titled, strict=True):
        axis.axhline(THRESHOLD, color="#c0392b", linestyle="--", linewidth=1)
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        axis.set(xlim=(0, 1), ylim=(0, 1), title=f"{title}: {len(period.shown)} shown")
        axis.set(xlabel="confidence (geometric mean over tokens)")
        if len(period.shown) < _BINS:
            continue
        confidence = np.array([one.confidence for one in period.shown])
        accepted = np.array([one.accepted for one in period.shown])
        for part in np.array_split(np.argsort(confidence), _BINS):
            share = accepted[part].mean()
            error = 1.96 * np.sqrt(max(share * (1 - share), 0.25 / len(part)) / len(part))
            axis.errorbar(
                confidence[part].mean(), share, yerr=error, fmt="o", color="#1f5fa8", capsize=2
            )
    axes[0].set(ylabel="share accepted (pays above 25 %)")
    figure.savefig(path, dpi=130)
