"""The table of paired differences of a sweep whose runs start from one recorded step.

Runs that start from one step, with one seed, draw the same tasks and the same random numbers. So
run i of one variant and run i of another are a pair, and so are their results on one task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import rich.markup
import rich.table

from rl_code.evaluation import suite
from rl_code.evaluation.paired import PairedDifference, paired_difference
from rl_code.evaluation.passk import Interval
from rl_code.evaluation.suite import SuiteResult
from rl_code.metrics.values import read_metrics
from rl_code.run import lineage


def table(base: str, runs: Iterable[tuple[str, int, Path]]) -> rich.table.Table:
    """One row for each other variant, suite or training, and kind of pair: the difference from the
    variant ``base``, which must have a run.

    runs: variant, seed and folder of each. ``differences`` says what the pairs are.
    """
    variants: dict[str, dict[int, Path]] = {}
    for variant, seed, workdir in runs:
        variants.setdefault(variant, {})[seed] = workdir
    first = variants.pop(base)
    view = rich.table.Table(
        caption=rich.markup.escape(
            f"Points minus those of {base}, mean [95 % interval]: pass@1 of the last evaluation, "
            "and in training the share of solved episodes since the fork. Pairs of tasks: both "
            "variants on one task, each the mean over its seeds. Pairs of seeds: the two runs of "
            "one seed, each the mean over its tasks or episodes. Variance ratio: how many times "
            "more pairs would be needed unpaired [95 % interval]."
        ),
        caption_justify="left",
    )
    for name in ("variant", "of", "pairs"):
        view.add_column(name, overflow="fold")
    for name in ("paired", "unpaired", "variance ratio"):
        view.add_column(name, justify="right")
    for variant, second in variants.items():
        for name, kind, found in differences(first, second):
            pairs = f"{found.pairs} {kind}"
            points = _points(found.paired), _points(found.unpaired)
            ratio = rich.markup.escape(_ratio(found.variance_ratio))
            view.add_row(rich.markup.escape(variant), name, pairs, *points, ratio)
    return view


def differences(
    first: Mapping[int, Path], second: Mapping[int, Path]
) -> list[tuple[str, str, PairedDifference]]:
    """(suite or "training", "tasks" or "seeds", difference) of two variants, by the seeds that both
    have.

    Pairs of tasks are the means over the seeds, which say how far the difference holds for other
    tasks. Pairs of seeds are the means over tasks, or over the episodes of training since the fork.
    They say how far the difference holds for other random numbers, and need two seeds or more.
    Steps of training are no pairs: what a run learned in one step is still there in the next.
    """
    seeds = [seed for seed in first if seed in second]
    found = []
    one = {seed: _last(first[seed]) for seed in seeds}
    other = {seed: _last(second[seed]) for seed in seeds}
    names = dict.fromkeys(name for results in one.values() for name in results)
    for name in names:
        both = [seed for seed in seeds if name in one[seed] and name in other[seed]]
        if any(set(one[seed][name].ids) != set(other[seed][name].ids) for seed in both):
            continue  # other tasks are no pairs
        values = [
            np.array([_pass_rates(of_run[seed][name]) for seed in both]) for of_run in (one, other)
        ]
        for kind, axis in (("tasks", 0), ("seeds", 1)):
            pairs = [of_run.mean(axis) for of_run in values if of_run.size]
            if len(pairs) == 2 and len(pairs[0]) > 1:
                found.append((name, kind, paired_difference(*pairs)))
    trained = [(_solved(first[seed]), _solved(second[seed])) for seed in seeds]
    pairs = [pair for pair in trained if None not in pair]
    if len(pairs) > 1:
        found.append(("training", "seeds", paired_difference(*zip(*pairs, strict=True))))
    return found


def _solved(workdir: Path) -> float | None:
    """The share of the episodes that were solved in the steps since the fork; None where there is
    no such step.
    """
    begin = max((fork.step for fork in lineage.read(workdir)), default=0)
    rows = [row for row in read_metrics(workdir) if row["step"] >= begin]
    found = [row["reward/solved"] for row in rows if "reward/solved" in row]
    return float(np.mean(found)) if found else None


def _last(workdir: Path) -> dict[str, SuiteResult]:
    """The last result of each suite of a run."""
    return {result.suite: result for result in suite.load_all(workdir)}


def _pass_rates(result: SuiteResult) -> list[float]:
    """pass@1 of each task, in the order of their ids."""
    rates = dict(zip(result.ids, result.pass_at(1), strict=True))
    return [rates[id] for id in sorted(rates)]


def _points(interval: Interval) -> str:
    return rich.markup.escape(suite.percent(interval, signed=True))


def _ratio(interval: Interval) -> str:
    values = dataclasses.astuple(interval)
    mean, low, high = (f"{value:.1f}" if value < 10 else f"{value:.0f}" for value in values)
    return f"{mean} [{low}, {high}]"
