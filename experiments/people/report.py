"""The table and the figure of the study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import rich.table
from matplotlib.figure import Figure

from experiments.people.study import Line

# Below this chance a suggestion of +0.75 and -0.25 is better not shown.
THRESHOLD = 0.25
_BINS = 8


def table(lines: Sequence[Line]) -> rich.table.Table:
    """One line per model and split; gains are over the first model of the same split."""
    view = rich.table.Table(
        caption="95 % intervals: bootstrap over persons", caption_justify="left"
    )
    for name in ("what", "model"):
        view.add_column(name)
    for name in ("split by", "decisions", "nats each", "gain over the first"):
        view.add_column(name, justify="right")
    first: dict[tuple[str, str], Line] = {}
    for line in lines:
        base = first.setdefault((line.what, line.split), line)
        gain, low, high = line.above(base)
        told = "" if base is line else f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]"
        count = f"{len(line.scores)}"
        view.add_row(line.what, line.model, line.split, count, f"{line.mean:.3f}", told)
    return view


def bins(chances: np.ndarray, accepted: np.ndarray) -> list[tuple[float, float, float, int]]:
    """(mean chance, share accepted, its standard error, count) in bins of equal counts."""
    found = []
    for part in np.array_split(np.argsort(chances), _BINS):
        share = accepted[part].mean()
        error = np.sqrt(max(share * (1 - share), 0.25 / len(part)) / len(part))
        found.append((float(chances[part].mean()), float(share), float(error), len(part)))
    return found


def draw(calibrations: dict[str, tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """Calibration on held-out decisions, one panel per split."""
    figure = Figure(figsize=(4.2 * len(calibrations), 4), layout="constrained")
    axes = figure.subplots(1, len(calibrations), squeeze=False)[0]
    for axis, (split, (chances, accepted)) in zip(axes, calibrations.items(), strict=True):
        x, y, error, _ = np.array(bins(chances, accepted)).T
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        axis.errorbar(x, y, yerr=1.96 * error, fmt="o", color="#1f5fa8", capsize=2)
        axis.axvline(THRESHOLD, color="#c0392b", linestyle="--", linewidth=1)
        axis.annotate("pays above 25 %", (THRESHOLD + 0.02, 0.93), color="#c0392b", fontsize=8)
        axis.set(xlim=(0, 1), ylim=(0, 1), title=f"held out by {split}")
        axis.set(xlabel="predicted chance of acceptance", ylabel="share accepted")
    figure.savefig(path, dpi=130)
