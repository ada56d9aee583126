"""The table of paired differences of a sweep whose runs start from one recorded step.

Runs that start from one step, with one seed, draw the same tasks and the same random numbers. So
run i of one variant and run i of another are a pair, and so are their results on one task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import rich.markup
import rich.table

from rl_code.evaluation import suite
from rl_code.evaluation.paired import PairedDifference, paired_difference
from rl_code.evaluation.passk import Interval
from rl_code.evaluation.suite import SuiteResult


def table(runs: Iterable[tuple[str, int, Path]]) -> rich.table.Table:
    """One row for each variant after the first, suite, and kind of pair: pass@1 of the last
    evaluation, minus that of the first variant.

    runs: variant, seed and folder of each. Pairs are tasks (the mean over the seeds that both
    have), which says how far the difference holds for other tasks, and seeds where there are two or
    more, which says how far it holds for other random numbers.
    """
    variants: dict[str, dict[int, Path]] = {}
    for variant, seed, workdir in runs:
        variants.setdefault(variant, {})[seed] = workdir
    view = rich.table.Table(
        caption=rich.markup.escape(
            "pass@1 in points, minus that of the first variant: mean [95 % interval]"
        ),
        caption_justify="left",
    )
    for name in ("variant", "suite", "pairs"):
        view.add_column(name, overflow="fold")
    for name in ("paired", "unpaired", "variance ratio"):
        view.add_column(name, justify="right")
    (_, first), *others = variants.items()
    for variant, runs in others:
        for name, kind, found in differences(first, runs):
            ratio = f"{found.variance_ratio:.1f}"
            pairs = f"{found.pairs} {kind}"
            points = _points(found.paired), _points(found.unpaired)
            view.add_row(rich.markup.escape(variant), name, pairs, *points, ratio)
    return view


def differences(
    first: Mapping[int, Path], second: Mapping[int, Path]
) -> list[tuple[str, str, PairedDifference]]:
    """(suite, "tasks" or "seeds", difference) of two variants, by the seeds that both have."""
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
    return found


def _last(workdir: Path) -> dict[str, SuiteResult]:
    """The last result of each suite of a run."""
    return {result.suite: result for result in suite.load_all(workdir)}


def _pass_rates(result: SuiteResult) -> list[float]:
    """pass@1 of each task, in the order of their ids."""
    rates = dict(zip(result.ids, result.pass_at(1), strict=True))
    return [rates[id] for id in sorted(rates)]


def _points(interval: Interval) -> str:
    return rich.markup.escape(suite.percent(interval, signed=True))
