"""Rewards of each policy by each judge, in the last steps of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import rich.table
import scipy

from rl_code.evaluation.passk import LEVEL
from rl_code.metrics import read_metrics

# Share of the steps, the last ones, that are averaged.
_LAST = 0.25


def earned(run: Path, judge: str) -> float:
    """The mean pay of an episode by a judge, over the last quarter of a run's steps."""
    values = [row[f"judged/{judge}"] for row in read_metrics(run)]
    return float(np.mean(values[-max(1, round(_LAST * len(values))) :]))


def interval(values: Sequence[float]) -> str:
    """The mean over seeds with its interval by Student's t; the mean alone of one seed."""
    mean, seeds = float(np.mean(values)), len(values)
    if seeds < 2:
        return f"{mean:+.3f}"
    quantile = scipy.stats.t.ppf((1 + LEVEL) / 2, seeds - 1)
    half = quantile * np.std(values, ddof=1) / np.sqrt(seeds)
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def table(habits: Sequence[str], runs: Mapping[str, Mapping[int, Path]]) -> rich.table.Table:
    """One row for each simulator that policies were trained on, one column for each judge.

    runs: habits -> seed -> workdir. The last row is the difference within each seed between the
    policy that was trained on the judge and the one that was trained on the other simulator.
    """
    view = rich.table.Table(
        caption=f"mean pay of an episode, last {_LAST:.0%} of the steps; mean over seeds with "
        f"{LEVEL:.0%} intervals (Student's t)",
        caption_justify="left",
    )
    view.add_column("trained on")
    for judge in habits:
        view.add_column(f"judged by {judge}", justify="right")
    for trained, seeds in runs.items():
        cells = [interval([earned(run, judge) for run in seeds.values()]) for judge in habits]
        view.add_row(f"{trained} ({len(seeds)} seeds)", *cells)
    lost = []
    for judge in habits:
        (other,) = (one for one in habits if one != judge)
        common = sorted(runs[judge].keys() & runs[other].keys())
        differences = [
            earned(runs[other][seed], judge) - earned(runs[judge][seed], judge) for seed in common
        ]
        lost.append(interval(differences) if common else "-")
    view.add_row("lost by training on the other", *lost)
    return view
