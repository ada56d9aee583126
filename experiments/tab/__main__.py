"""Prints what a run of configs/tab.py came to, and draws its calibration.

    python -m experiments.tab runs/tab

The first and the last fifth of the steps are compared. A run that is not finished is shown as far
as it has come. The figure is tab.png in the folder of the run; nothing is trained.
"""

from __future__ import annotations

from pathlib import Path

from experiments.tab import report
from launch import command
from rl_code.workdir import STORE


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        command.refuse("name the workdir of a run, as in python -m experiments.tab runs/tab")
    run = Path(argv[1])
    if not (run / STORE).is_dir():
        command.refuse(f"{run} holds no run that was trained")
    found = list(report.episodes(run))
    steps = sorted({step for step, _, _ in found})
    if len(steps) < 2:
        command.refuse(f"{run} has {len(steps)} trained steps; two are needed to compare")
    part = max(1, len(steps) // 5)
    before, after = (
        report.Period([one for one in found if one[0] in chosen])
        for chosen in (set(steps[:part]), set(steps[-part:]))
    )
    command.console().print(report.table(before, after, part))
    report.draw(before, after, run / "tab.png")
    print(f"Figure: {run / 'tab.png'}")


if __name__ == "__main__":
    command.run(main, arguments=True)
