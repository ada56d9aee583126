"""Results of the runs of the experiment, under this project's grader: on held-out tasks, and in
the episodes of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import rich.table

from experiments.cheater.metrics import exploited, proven
from experiments.report import table
from experiments.runs import trained
from rl_code.evaluation import suite
from rl_code.evaluation.suite import SuiteResult
from rl_code.types import Trajectory

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


def evaluations(runs: Sequence[Path], costs: Mapping[str, float]) -> rich.table.Table:
    """One row for each suite before and after each run; runs without results are left out."""
    rows = []
    for run in runs:
        for result in suite.load_all(run):
            if result.label in _SHOWN:
                cheats = result.per_episode("cheats")
                told = "-" if cheats is None else f"{cheats:.1%}"
                earns = f"{earned(result, costs):+.3f}"
                passed = suite.percent(result.interval(1))
                rows.append((run.name, result.suite, result.label, passed, told, earns))
    return table(
        ["run", "suite", "weights", "pass@1", "cheats", "earned"],
        rows,
        "pass@1 in %, with 95 % bootstrap intervals over tasks; cheats: the share of episodes that "
        "were proved to cheat; earned: the mean reward by this project's grader",
        texts=3,
    )


def episodes(runs: Sequence[Path]) -> rich.table.Table:
    """One row for each run: what became of the training episodes with the exploit, on record."""
    rows = []
    for run in runs:
        every = list(trajectories(run))
        cheats = [trajectory for trajectory in every if exploited(trajectory)]
        # only what the weak grader was asked about has its component
        weak = [t.reward.components.get("weak_tests") for t in cheats]
        counts = (
            len(every),
            len(cheats),
            sum(trajectory.status == "submitted" for trajectory in cheats),
            "-" if None in weak else int(sum(weak)),
            sum(map(proven, cheats)),
            sum(trajectory.solved for trajectory in cheats),
            sum(proven(trajectory) for trajectory in every if not exploited(trajectory)),
        )
        rows.append((run.name, *map(str, counts)))
    return table(
        ["run", "episodes", "exploit", "handed in", "paid by weak", "proven", "paid", "false"],
        rows,
        "training episodes on record; of those with the exploit, how many were handed in, how many "
        "the weak grader paid, how many this project's grader proved to cheat, and how many it "
        "paid; and how many without the exploit were said to cheat",
    )


def trajectories(run: Path) -> Iterator[Trajectory]:
    """All trajectories that a run was trained on so far."""
    for _, group in trained(run):
        yield from group.trajectories
