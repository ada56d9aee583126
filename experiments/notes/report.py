"""Tokens that a solved task costs, by the number of tasks that share a repository."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import rich.table

from experiments.notes.study import VARIANTS, Compared
from experiments.report import AFTER, BEFORE, Estimate, band, figure, resampled, spread, table


def cost(one: Compared, chosen: np.ndarray | None = None, *, variant: int, tasks: int) -> float:
    """Tokens per solved task where each repository has its first ``tasks`` tasks, walks in idle
    time included; infinite where none was solved.

    chosen: numbers of the repositories that count, which may be repeated; None for all.
    """
    which = np.arange(len(one.walks)) if chosen is None else chosen
    solved = one.solved[variant, which, :tasks].sum()
    spent = one.tokens[variant, which, :tasks].sum()
    if variant == VARIANTS.index("with notes"):
        spent += one.walks[which].sum()
    return float(spent / solved) if solved else np.inf


def break_even(one: Compared, chosen: np.ndarray | None = None) -> float:
    """Tasks of a repository from which on notes pay, by the means over all tasks: the walk and so
    many tasks with notes cost a solved task as much as without. Infinite where they never do.
    """
    which = np.arange(len(one.walks)) if chosen is None else chosen
    plain, noted = (one.tokens[variant, which].sum(axis=-1).mean() for variant in (0, 1))
    shares = [one.solved[variant, which].mean() for variant in (0, 1)]
    if not shares[0]:
        return 0.0
    saved = plain * shares[1] / shares[0] - noted
    return float(one.walks[which].sum(axis=-1).mean() / saved) if saved > 0 else np.inf


def costs(found: Sequence[Compared]) -> rich.table.Table:
    """One row for each variant, of all tasks: means over seeds with their range."""
    tasks = found[0].solved.shape[-1]
    rows = []
    for variant, name in enumerate(VARIANTS):
        solved = spread([100 * one.solved[variant].mean() for one in found])
        each = spread([cost(one, variant=variant, tasks=tasks) for one in found])
        tokens = _tokens([one.tokens[variant].mean(axis=(0, 1)) for one in found])
        rows.append((name, solved.told(".1f", " %"), *tokens, each.told(",.0f")))
    walks = _tokens([one.walks.mean(axis=0) for one in found])
    return table(
        ["", "pass@1", "sampled", "read", f"tokens per solved task, {tasks} tasks"],
        [*rows, ("a walk in idle time", "", *walks)],
        f"means over {len(found)} seeds [lowest, highest]; {len(found[0].walks)} repositories with "
        f"{tasks} tasks each",
    )


def _tokens(spent: Sequence[np.ndarray]) -> list[str]:
    """Tokens sampled and read, over seeds. spent: [2] of each seed."""
    return [spread(each).told(",.0f") for each in np.transpose(spent)]


def summary(found: Sequence[Compared]) -> str:
    """Right notes and the break-even, over seeds, and its interval over repositories."""
    notes = spread([100 * one.right for one in found]).told(".1f", " %")
    pays = spread([break_even(one) for one in found]).told(".1f")
    drawn = over_repositories(found, break_even)
    return (
        f"notes right in every line: {notes}\n"
        f"notes pay from {pays} tasks of a repository on; 95 % interval of the mean over "
        f"repositories [{drawn.low:.1f}, {drawn.high:.1f}]"
    )


def over_repositories(
    found: Sequence[Compared], measure: Callable[[Compared, np.ndarray], float]
) -> Estimate:
    """The mean over seeds of a measure on repositories, which are the same for all seeds."""
    count = len(found[0].walks)
    return resampled(lambda chosen: np.mean([measure(one, chosen) for one in found]), count)


def draw(found: Sequence[Compared], path: Path) -> None:
    """Left tokens per solved task against the tasks of a repository, with 95 % intervals over
    repositories and a thin line for each seed; right what an episode samples and reads.
    """
    numbers = range(1, found[0].solved.shape[-1] + 1)
    with figure(path, 10.4, 4.0, 3, 2) as (left, right):
        for variant, (name, color) in enumerate(zip(VARIANTS, (BEFORE, AFTER), strict=True)):
            by_tasks = []
            for tasks in numbers:
                measure = functools.partial(cost, variant=variant, tasks=tasks)
                drawn = over_repositories(found, measure)
                by_tasks.append((drawn.mean, drawn.low, drawn.high))
            band(left, numbers, Estimate(*np.transpose(by_tasks)), color=color, label=name)
            for one in found:
                each = [cost(one, variant=variant, tasks=tasks) for tasks in numbers]
                left.plot(numbers, each, color=color, linewidth=0.6, alpha=0.6)
        left.set(xlabel="tasks of a repository", ylabel="tokens per solved task, walk included")
        left.set(title=f"{len(found)} seeds; bands: 95 % over repositories", ylim=(0, None))
        spent = [
            [one.tokens[variant].mean(axis=(0, 1)) for one in found]
            for variant in range(len(VARIANTS))
        ]
        spent.append([one.walks.mean(axis=0) for one in found])
        places = np.arange(len(spent))
        sampled, read = np.mean(spent, axis=1).T
        right.bar(places, sampled, color="#e0a63a", label="sampled")
        right.bar(places, read, bottom=sampled, color="#5f9ea0", label="read")
        totals = np.sum(spent, axis=2)
        right.vlines(places, totals.min(1), totals.max(1), color="black", linewidth=1)
        right.set_xticks(places, [*VARIANTS, "walk, once"])
        right.set(ylabel="tokens of an episode")
        right.set(title="means; black: from the lowest to the highest seed")
