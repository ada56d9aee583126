"""Prints what runs of configs/tab.py came to, and draws their curves and calibration.

    python -m experiments.tab runs/tab

runs/tab is the workdir of a sweep, or of one run. The first and the last steps are compared, a
fifth of all and at most 24. Runs that are not finished are shown as far as they have come. The
figure is tab.png in the folder; nothing is trained.
"""

from __future__ import annotations

from pathlib import Path

from experiments.tab import report
from launch import command
from rl_code.run.workdir import STORE


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        command.refuse("name the workdir of runs, as in python -m experiments.tab runs/tab")
    folder = Path(argv[1])
    runs = [one for one in (folder, *sorted(folder.glob("*/"))) if (one / STORE).is_dir()]
    if not runs:
        command.refuse(f"{folder} holds no run that was trained")
    found = [one for number, run in enumerate(runs) for one in report.groups(run, number)]
    steps = len({one.step for one in found})
    if steps < 2:
        command.refuse(f"{folder} has {steps} trained steps; two are needed to compare")
    command.console().print(report.changes(found), report.kinds(found))
    report.draw(found, folder / "tab.png")


if __name__ == "__main__":
    command.run(main, arguments=True)
