"""Rewards on fresh holes of runs on data of older policies, by the updates made.

    python -m experiments.tab.windows runs/windows

runs/windows is the workdir of a sweep over configs/windows.py. Prints a table; the figure is
windows.png in the folder. Nothing is trained.
"""

from __future__ import annotations

from pathlib import Path

from experiments.tab.stale import curves, draw, rewards
from launch import command


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        command.refuse("name the workdir of a sweep, as in python -m experiments.tab.windows a")
    folder = Path(argv[1])
    found = curves(folder)
    if not found:
        command.refuse(f"{folder} holds no run of configs/windows.py that has finished")
    command.console().print(rewards(found))
    draw(found, folder / "windows.png")


if __name__ == "__main__":
    command.run(main, arguments=True)
