"""Plays idle time and tasks with the models of configs/notes.py, and prints what notes save.

    python -m experiments.notes runs/notes [--compared=12] [--tasks_each=16]

runs/notes is the workdir of a sweep, or of one run. Each model walks through repositories that no
demonstration is of, and then plays the same tasks on them with its notes and without. Prints a
table; the figure is notes.png in the folder. Nothing is trained.
"""

from __future__ import annotations

from pathlib import Path

import jax
from absl import flags as absl_flags

from configs.notes import COMPARED, TASKS
from experiments.notes.report import costs, draw, summary
from experiments.notes.study import Compared, compare
from experiments.tab import held_out
from launch import command, flags
from rl_code import sft
from rl_code.recording import kept_config
from rl_code.run.config import meshes
from rl_code.run.workdir import CONFIG_FILE
from sweeps.done import finished

_COMPARED = absl_flags.DEFINE_integer("compared", COMPARED, "Repositories.", 2)
_TASKS_EACH = absl_flags.DEFINE_integer("tasks_each", TASKS, "Tasks of each repository.", 1)


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        command.refuse("name the workdir of runs, as in python -m experiments.notes runs/notes")
    folder = Path(argv[1])
    alone = [folder] if (folder / CONFIG_FILE).is_file() else []
    runs = alone or [run for run, _ in finished(folder)]
    if not runs:
        command.refuse(f"{folder} holds no run of configs/notes.py that has finished")
    flags.use_virtual_devices(*meshes(kept_config.read(runs[0])))
    found = [_compared(run) for run in runs]
    command.console().print(costs(found))
    print(summary(found))
    draw(found, folder / "notes.png")


def _compared(workdir: Path) -> Compared:
    with held_out.opened(workdir) as run, jax.set_mesh(run.mesh):
        return compare(run, sft.initial_model(run), _COMPARED.value, _TASKS_EACH.value)


if __name__ == "__main__":
    command.run(main, arguments=True)
