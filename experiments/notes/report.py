"""Tokens that a solved task costs, by the number of tasks that share a repository."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import rich.table
from matplotlib.figure import Figure

from experiments.notes.study import ARMS, Compared

_REPEATS = 1_000
_COLORS = ("#8a8f98", "#1f5fa8")


def cost(one: Compared, arm: int, tasks: int, chosen: np.ndarray | None = None) -> float:
    """Tokens per solved task where each repository has its first ``tasks`` tasks, walks in idle
    time included; infinite where none was solved.

    chosen: numbers of the repositories that count, which may be repeated; None for all.
    """
    which = np.arange(len(one.walks)) if chosen is None else chosen
    solved = one.solved[arm, which, :tasks].sum()
    spent = one.tokens[arm, which, :tasks].sum()
    if arm == ARMS.index("with notes"):
        spent += one.walks[which].sum()
    return float(spent / solved) if solved else np.inf


def _cost_of(one: Compared, chosen: np.ndarray, arm: int, tasks: int) -> float:
    return cost(one, arm, tasks, chosen)


def break_even(one: Compared, chosen: np.ndarray | None = None) -> float:
    """Tasks of a repository from which on notes pay, by the means over all tasks: the walk and so
    many tasks with notes cost a solved task as much as without. Infinite where they never do.
    """
    which = np.arange(len(one.walks)) if chosen is None else chosen
    plain, noted = (one.tokens[arm, which].sum(axis=-1).mean() for arm in (0, 1))
    shares = [one.solved[arm, which].mean() for arm in (0, 1)]
    if not shares[0]:
        return 0.0
    saved = plain * shares[1] / shares[0] - noted
    return float(one.walks[which].sum(axis=-1).mean() / saved) if saved > 0 else np.inf


def table(found: Sequence[Compared]) -> rich.table.Table:
    """One row for each arm, of all tasks: means over seeds with their range."""
    tasks = found[0].solved.shape[-1]
    view = rich.table.Table(
        caption=f"means over {len(found)} seeds [lowest, highest]; {len(found[0].walks)} "
        f"repositories with {tasks} tasks each",
        caption_justify="left",
    )
    for name in ("", "pass@1", "sampled", "read", f"tokens per solved task, {tasks} tasks"):
        view.add_column(name, justify="right" if name else "left")
    for arm, name in enumerate(ARMS):
        spent = [one.tokens[arm].mean(axis=(0, 1)) for one in found]
        view.add_row(
            name,
            told([100 * one.solved[arm].mean() for one in found], 1, " %"),
            told([one[0] for one in spent]),
            told([one[1] for one in spent]),
            told([cost(one, arm, tasks) for one in found]),
        )
    walks = [one.walks.mean(axis=0) for one in found]
    view.add_row(
        "a walk in idle time", "", told([one[0] for one in walks]), told([one[1] for one in walks])
    )
    return view


def summary(found: Sequence[Compared]) -> str:
    """Right notes and the break-even, over seeds, and its interval over repositories."""
    drawn = resampled(found, break_even)
    low, high = np.quantile(drawn, [0.025, 0.975], method="nearest")
    notes = told([100 * one.right for one in found], 1, " %")
    pays = told([break_even(one) for one in found], 1)
    return (
        f"notes right in every line: {notes}\n"
        f"notes pay from {pays} tasks of a repository on; 95 % interval of the mean over "
        f"repositories [{low:.1f}, {high:.1f}]"
    )


def told(values: Sequence[float], digits: int = 0, unit: str = "") -> str:
    """The mean over seeds and their range."""
    mean, low, high = (f"{x:,.{digits}f}" for x in (np.mean(values), min(values), max(values)))
    return f"{mean}{unit}" if low == high else f"{mean} [{low}, {high}]{unit}"


def resampled(
    found: Sequence[Compared], measure: Callable[[Compared, np.ndarray], float]
) -> np.ndarray:
    """[repeats], the mean over seeds of a measure on repositories drawn with replacement, which are
    the same for all seeds.
    """
    rng = np.random.default_rng(0)
    count = len(found[0].walks)
    draws = [rng.choice(count, count) for _ in range(_REPEATS)]
    return np.array([np.mean([measure(one, chosen) for one in found]) for chosen in draws])


def draw(found: Sequence[Compared], path: Path) -> None:
    """Left tokens per solved task against the tasks of a repository, with 95 % intervals over
    repositories and a thin line for each seed; right what an episode samples and reads.
    """
    figure = Figure(figsize=(10.4, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    numbers = np.arange(1, found[0].solved.shape[-1] + 1)
    for arm, (name, color) in enumerate(zip(ARMS, _COLORS, strict=True)):
        each = np.array([[cost(one, arm, int(n)) for n in numbers] for one in found])
        bounds = []
        for n in numbers:
            drawn = resampled(found, functools.partial(_cost_of, arm=arm, tasks=int(n)))
            bounds.append(np.quantile(drawn, [0.025, 0.975], method="nearest"))
        left.plot(numbers, each.mean(axis=0), color=color, marker="o", markersize=3, label=name)
        left.plot(numbers, each.T, color=color, linewidth=0.6, alpha=0.6)
        left.fill_between(numbers, *np.array(bounds).T, color=color, alpha=0.18, linewidth=0)
    left.set(xlabel="tasks of a repository", ylabel="tokens per solved task, walk included")
    left.set_ylim(bottom=0)
    left.set_title(f"{len(found)} seeds; bands: 95 % over repositories", fontsize=10)
    left.legend(frameon=False)
    bars = {name: [one.tokens[arm].mean(axis=(0, 1)) for one in found] for arm, name in
            enumerate(ARMS)}  # fmt: skip
    bars["walk, once"] = [one.walks.mean(axis=0) for one in found]
    for place, values in enumerate(bars.values()):
        sampled, read = np.mean(values, axis=0)
        first = place == 0
        right.bar(place, sampled, color="#e0a63a", label="sampled" if first else None)
        right.bar(place, read, bottom=sampled, color="#5f9ea0", label="read" if first else None)
        totals = [sum(one) for one in values]
        right.vlines(place, min(totals), max(totals), color="black", linewidth=1)
    right.set_xticks(range(len(bars)), list(bars), fontsize=9)
    right.set(ylabel="tokens of an episode")
    right.set_title("means; black: from the lowest to the highest seed", fontsize=10)
    right.legend(frameon=False)
    figure.savefig(path, dpi=110)
