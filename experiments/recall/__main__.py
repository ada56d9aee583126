"""Trains one small model per attention method on recall over documents, then prints a table and
draws a figure.

python -m experiments.recall --config=configs/recall.py[:smoke] --workdir=runs/recall

Methods that are done are not run again and a stopped one continues, so the same command can be
given again at any time. The workdir then holds one folder per method, recall.txt (the table) and
recall.png (the figure).
"""

from __future__ import annotations

from pathlib import Path

import ml_collections
import rich.console

from experiments.recall.report import accuracies, draw
from experiments.recall.study import RecallExperiment, run_method
from launch import flags
from rl_code.config import read_config
from rl_code.host.stop import StopRequest


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    experiment = read_config.build(RecallExperiment, config)
    folder = Path(workdir)
    flags.use_virtual_devices(experiment.mesh)
    with StopRequest() as stop:
        results = [run_method(experiment, name, folder / name, stop) for name in experiment.methods]
    view = accuracies(experiment, results)
    flags.console().print(view)
    with open(folder / "recall.txt", "w") as file:
        rich.console.Console(file=file, width=132).print(view)
    draw(experiment, results, folder / "recall.png")


if __name__ == "__main__":
    flags.run(main, expected=(FloatingPointError,))
