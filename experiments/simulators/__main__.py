"""Prints what policies earn with the programmers they were trained on, and with others.

    python -m experiments.simulators runs/simulators

runs/simulators is the workdir of a sweep over configs/simulators.py. Only finished runs count;
nothing is run.
"""

from __future__ import annotations

from pathlib import Path

from configs.simulators import HABITS
from experiments.simulators import report
from launch import command
from sweeps.done import finished


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        command.refuse("name the workdir of a sweep, as in python -m experiments.simulators runs/a")
    runs: dict[str, dict[int, Path]] = {}
    for workdir, config in finished(Path(argv[1])):
        ((signal,),) = (config["reward"]["signals"],)
        habits = signal["signal"]["settings"]["habits"]
        runs.setdefault(habits, {})[config["seed"]] = workdir
    if missing := [habits for habits in HABITS if habits not in runs]:
        command.refuse(f"{argv[1]} holds no finished run that was trained on {missing[0]}")
    command.console().print(report.judgements(HABITS, runs))


if __name__ == "__main__":
    command.run(main, arguments=True)
