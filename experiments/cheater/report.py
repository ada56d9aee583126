"""What the runs of the experiment come to on held-out tasks, under this project's grader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import rich.markup
import rich.table

from rl_code.evaluation import suite
from rl_code.evaluation.suite import SuiteResult

# A result during training is of another number of samples than those before and after it.
_SHOWN = ("before", "after")


def earned(result: SuiteResult, costs: Mapping[str, float]) -> float:
    """The mean reward of an episode by ``tests``, ``integrity`` and ``malformed``.

    costs: what a proven cheat ("integrity") and a malformed call ("malformed") cost.
    """
    cheats = result.per_episode("cheats") or 0.0
    malformed = result.per_episode("malformed") or 0.0
    solved = sum(task.correct for task in result.tasks) / sum(task.n for task in result.tasks)
    return solved - costs["integrity"] * cheats - costs["malformed"] * malformed


def table(runs: Sequence[Path], costs: Mapping[str, float]) -> rich.table.Table:
    """One row for each suite before and after each run; runs without results are left out."""
    view = rich.table.Table(
        caption="pass@1 in %, with 95 % bootstrap intervals over tasks; cheats: the share of "
        "episodes that were proved to cheat; earned: the mean reward by this project's grader",
        caption_justify="left",
    )
    view.add_column("run", overflow="fold")
    for name in ("suite", "weights"):
        view.add_column(name)
    for name in ("pass@1", "cheats", "earned"):
        view.add_column(name, justify="right")
    for run in runs:
        for result in suite.load_all(run):
            if result.label in _SHOWN:
                cheats = result.per_episode("cheats")
                view.add_row(
                    rich.markup.escape(run.name),
                    result.suite,
                    result.label,
                    suite.percent(result.interval(1)),
                    "-" if cheats is None else f"{cheats:.1%}",
                    f"{earned(result, costs):+.3f}",
                )
    return view
