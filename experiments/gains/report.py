"""Updates that it takes to gain so many points of held-out pass@1, and until it is highest."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import rich.table

from experiments.report import spread, table
from rl_code.metrics.values import read_metrics
from sweeps import fork


def variant_of(workdir: Path) -> str:
    """The name of a run of a sweep without its seed."""
    return re.sub(r",?seed=\d+$", "", workdir.name).removeprefix("variant=")


def updates_to(points: Sequence[tuple[int, float]], gain: float) -> float | None:
    """The first step at which a score is ``gain`` above the first one, on straight lines between
    the evaluations; None where it is not reached.

    points: (step, score), in order.
    """
    wanted = points[0][1] + gain
    for (step, score), (later, higher) in itertools.pairwise(points):
        if higher >= wanted:
            return step + (later - step) * (wanted - score) / (higher - score)
    return None


def gains(variants: Mapping[str, Sequence[Path]], points: float) -> rich.table.Table:
    """One row for each variant and suite.

    variants: the folders of each variant's runs. points: the gain that is waited for.
    """
    rows = []
    for variant, workdirs in variants.items():
        silent = spread([_without_signal(workdir) for workdir in workdirs]).told(".1%")
        for suite, curves in _curves(workdirs).items():
            before = spread([100 * curve[0][1] for curve in curves])
            after = spread([100 * curve[-1][1] for curve in curves])
            found = [updates_to(curve, points / 100) for curve in curves]
            taken = ", ".join("never" if one is None else f"{one:.0f}" for one in found)
            best = [max(curve, key=lambda point: point[1]) for curve in curves]
            highest = ", ".join(f"{100 * score:.1f} at {step}" for step, score in best)
            row = (variant, suite, str(len(curves)), before.told(".1f"), after.told(".1f"))
            rows.append((*row, taken, highest, silent))
    return table(
        [
            *("variant", "suite", "runs", "first", "last"),
            *(f"updates to +{points:g}", "highest", "no signal"),
        ],
        rows,
        "pass@1 in % where a run or a fork begins and after it: mean [lowest, highest] over runs; "
        "for each run the updates to that gain, and where pass@1 is highest; share of the groups "
        "whose rewards are all equal, over all steps",
        texts=2,
    )


def _curves(workdirs: Sequence[Path]) -> dict[str, list[list[tuple[int, float]]]]:
    """By suite, the curve of each run that was evaluated more than once."""
    found: dict[str, list[list[tuple[int, float]]]] = {}
    for workdir in workdirs:
        curves: dict[str, list[tuple[int, float]]] = {}
        for result in fork.evaluations(workdir):
            point = (result.step, float(np.mean(result.pass_at(1))))
            curves.setdefault(result.suite, []).append(point)
        for suite, curve in curves.items():
            if len(curve) > 1:
                found.setdefault(suite, []).append(curve)
    return found


def _without_signal(workdir: Path) -> float:
    return float(np.mean([1 - row["reward/signal_groups"] for row in read_metrics(workdir)]))
