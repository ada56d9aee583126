"""Two results on the same tasks, compared task by task.

The difference of means has a paired percentile-bootstrap interval: tasks are resampled, each with
both of its values. What makes a task easy or hard for both results therefore cancels. With one
sample per task (greedy decoding), some tasks are solved in only one of the two results. The exact
McNemar test (McNemar 1947, with binomial tails) gives the probability that chance splits these
tasks between the results at least so unevenly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import rich.table
import scipy  # reads scipy.stats when it is first used, which takes most of a second

from rl_code.evaluation.passk import Interval, mean_interval
from rl_code.evaluation.suite import SuiteResult, percent


@dataclasses.dataclass(frozen=True)
class Comparison:
    """pass@k of two results on the same tasks."""

    k: int
    before: Interval
    after: Interval
    # After minus before, paired by task.
    difference: Interval
    # Tasks whose pass@k rose, and tasks whose pass@k fell.
    gained: int
    lost: int
    # Of the exact McNemar test, two-sided; None unless both results have one sample of each task.
    p_value: float | None


def compare(before: SuiteResult, after: SuiteResult, k: int) -> Comparison:
    """Compares pass@k of two results, whatever the order of their tasks.

    Raises ValueError naming the tasks that only one of them has, or that have fewer than k samples.
    """
    _refuse_other_tasks(before, after)
    first = dict(zip(before.ids, before.pass_at(k), strict=True))
    second = dict(zip(after.ids, after.pass_at(k), strict=True))
    deltas = [second[id] - first[id] for id in before.ids]
    gained = sum(delta > 0 for delta in deltas)
    lost = sum(delta < 0 for delta in deltas)
    single = all(task.n == 1 for task in (*before.tasks, *after.tasks))
    return Comparison(
        k=k,
        before=before.interval(k),
        after=after.interval(k),
        difference=mean_interval(deltas),
        gained=gained,
        lost=lost,
        p_value=mcnemar(gained, lost) if single else None,
    )


def whole_against_first_edit(result: SuiteResult) -> Interval:
    """pass@1 of whole episodes minus that of their first edits alone, paired by task."""
    whole = result.pass_at(1)
    first = result.pass_at(1, first_edit=True)
    return mean_interval([a - b for a, b in zip(whole, first, strict=True)])


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value: of gained + lost fair coins, how likely is a split at least this
    uneven.

    Raises ValueError for negative counts.
    """
    if min(gained, lost) < 0:
        raise ValueError(f"counts must not be negative: {gained=}, {lost=}")
    n = gained + lost
    return float(scipy.stats.binomtest(gained, n, 0.5).pvalue) if n else 1.0


def table(comparisons: Sequence[Comparison]) -> rich.table.Table:
    """One row per comparison."""
    view = rich.table.Table(
        caption="in %, paired by task, with 95 % bootstrap intervals", caption_justify="left"
    )
    for name in ("", "before", "after", "difference", "tasks gained", "tasks lost", "McNemar p"):
        view.add_column(name, justify="right")
    for c in comparisons:
        p_value = "-" if c.p_value is None else f"{c.p_value:.3g}"
        intervals = percent(c.before), percent(c.after), percent(c.difference, signed=True)
        view.add_row(f"pass@{c.k}", *intervals, str(c.gained), str(c.lost), p_value)
    return view


def _refuse_other_tasks(before: SuiteResult, after: SuiteResult) -> None:
    problems = []
    for one, other in ((before, after), (after, before)):
        missing = sorted(set(one.ids) - set(other.ids))
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            problems.append(f"only {one.suite}.{one.label} has {', '.join(missing[:5])}{more}")
    if problems:
        raise ValueError(f"results on different tasks cannot be paired: {'; '.join(problems)}")
