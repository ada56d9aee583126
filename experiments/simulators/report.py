"""Rewards of each policy by each judge, in the last steps of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import rich.table

from experiments.report import student, table
from rl_code.evaluation.passk import LEVEL
from rl_code.metrics.values import read_metrics

# Share of the steps, the last ones, that are averaged.
_LAST = 0.25


def earned(run: Path, judge: str) -> float:
    """The mean pay of an episode by a judge, over the last quarter of a run's steps."""
    values = [row[f"judged/{judge}"] for row in read_metrics(run)]
    return float(np.mean(values[-max(1, round(_LAST * len(values))) :]))


def judgements(habits: Sequence[str], runs: Mapping[str, Mapping[int, Path]]) -> rich.table.Table:
    """One row for each simulator that policies were trained on, one column for each judge.

    runs: habits -> seed -> workdir. The last row is the difference within each seed between the
    policy that was trained on the judge and the one that was trained on the other simulator.
    """
    rows = []
    for trained, seeds in runs.items():
        found = [student([earned(run, judge) for run in seeds.values()]) for judge in habits]
        rows.append((f"{trained} ({len(seeds)} seeds)", *(one.told() for one in found)))
    lost = []
    for judge in habits:
        (other,) = (one for one in habits if one != judge)
        common = sorted(runs[judge].keys() & runs[other].keys())
        differences = [
            earned(runs[other][seed], judge) - earned(runs[judge][seed], judge) for seed in common
        ]
        lost.append(student(differences).told() if common else "-")
    return table(
        ["trained on", *(f"judged by {judge}" for judge in habits)],
        [*rows, ("lost by training on the other", *lost)],
        f"mean pay of an episode, last {_LAST:.0%} of the steps; mean over seeds with {LEVEL:.0%} "
        "intervals (Student's t)",
    )
