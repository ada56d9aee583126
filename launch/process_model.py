"""Trains a process reward model on what runs with rollout.forks have on record.

    python -m launch.process_model --config=configs/process_model.py --workdir=runs/prm \\
        --config.runs="('runs/forked',)" --config.backbone=runs/forked@100

The label of a turn is the share of the continuations from its end that solved the task. Some tasks
are held out, and the table says how well the model tells their turns apart: it must beat the error
of the mean label. The same command goes on where it stopped. A run is then paid by
reward.signals with dict(name="process", weights="runs/prm@300", form="minimum").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_collections
import rich.table

from launch import command, flags
from rl_code.config import read_config
from rl_code.recording.process_training import ProcessModelConfig, train
from rl_code.store.errors import StoreError


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    settings = read_config.build(ProcessModelConfig, config)
    flags.use_virtual_devices(settings.mesh)
    judged = train(settings, Path(workdir))
    command.console().print(table(judged))


def table(judged: dict[str, Any]) -> rich.table.Table:
    """A row for each kind of border of the held-out tasks."""
    names = ("count", "label", "error", "error_of_mean", "auc", "ece")
    view = rich.table.Table("held out", *(name.replace("_", " ") for name in names))
    for kind, found in judged.items():
        cells = [found.get(name) for name in names]
        view.add_row(kind, *(f"{x:.3g}" if x is not None else "" for x in cells))
    return view


if __name__ == "__main__":
    flags.run(main, kind=ProcessModelConfig, expected=(StoreError,), lasting=(FloatingPointError,))
