"""Prints what trained cheaters come to: on held-out tasks, and of the episodes they learned from.

    python -m experiments.cheater runs/cheater

runs/cheater is the workdir of a sweep over configs/cheater.py; runs that are not finished are shown
as far as they have come. Nothing is run.
"""

from __future__ import annotations

from pathlib import Path

from configs.cheater import COSTS
from experiments.cheater import report
from launch import command
from rl_code.evaluation import suite


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        command.refuse("name the workdir of a sweep, as in python -m experiments.cheater runs/a")
    folder = Path(argv[1])
    runs = sorted(path for path in folder.glob("*/") if (path / suite.FOLDER).is_dir())
    if not runs:
        command.refuse(f"{folder} holds no run that was evaluated")
    command.console().print(report.evaluations(runs, COSTS), report.episodes(runs))


if __name__ == "__main__":
    command.run(main, arguments=True)
