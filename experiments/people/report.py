"""The table and the figure of the study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import rich.table

from experiments.people.study import Line
from experiments.report import AFTER, BOUND, calibration, figure, table

# Below this chance a suggestion of +0.75 and -0.25 is better not shown.
THRESHOLD = 0.25


def predictions(lines: Sequence[Line]) -> rich.table.Table:
    """One line per model and split; gains are over the first model of the same split."""
    rows = []
    first: dict[tuple[str, str], Line] = {}
    for line in lines:
        base = first.setdefault((line.what, line.split), line)
        told = "" if base is line else line.above(base).told()
        count = str(len(line.scores))
        rows.append((line.what, line.model, line.split, count, f"{line.mean:.3f}", told))
    columns = ["what", "model", "split by", "decisions", "nats each", "gain over the first"]
    return table(columns, rows, "95 % intervals: bootstrap over persons", texts=3)


def draw(calibrations: dict[str, tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """Calibration on held-out decisions, one panel per split."""
    count = len(calibrations)
    with figure(path, 4.2 * count, 4, *[1] * count) as axes:
        for axis, (split, (chances, accepted)) in zip(axes, calibrations.items(), strict=True):
            axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
            calibration(axis, chances, accepted, color=AFTER)
            axis.axvline(THRESHOLD, color=BOUND, linestyle="--", linewidth=1)
            axis.annotate("pays above 25 %", (THRESHOLD + 0.02, 0.93), color=BOUND, fontsize=8)
            axis.set(xlim=(0, 1), ylim=(0, 1), title=f"held out by {split}")
            axis.set(xlabel="predicted chance of acceptance", ylabel="share accepted")
