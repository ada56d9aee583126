"""The share of noise in the gradient of a batch, by the size of the batch, and how well a batch
tells the objective.

    python -m experiments.tab.noise runs/tab/seed=2 [--groups=128]

The argument is the workdir of a finished run of configs/tab.py. Its policy before reinforcement
learning and after it fill held-out holes, three disjoint sets of them, and each group's gradient is
taken alone. From the products of all pairs of gradients follows what batches of any size come to,
so nothing is trained. Prints a table; the figure is noise.png in the folder.
"""

from __future__ import annotations

import jax
from absl import flags as absl_flags

from experiments.tab import held_out
from experiments.tab.gradients import SETS, draw, measure, scales
from launch import command, flags
from rl_code import sft
from rl_code.recording import kept_config
from rl_code.run.config import meshes

_GROUPS = absl_flags.DEFINE_integer("groups", 64, "Groups of each of the three sets.", 2)


def main(argv: list[str]) -> None:
    folder = command.workdir_of(argv, "configs/tab.py")
    flags.use_virtual_devices(*meshes(kept_config.read(folder)))
    with held_out.opened(folder) as run, jax.set_mesh(run.mesh):
        last, step = run.saved_model(folder)
        policies = {"after the warm start": sft.initial_model(run), f"after step {step}": last}
        count = SETS * _GROUPS.value
        found = {name: measure(run, model, count) for name, model in policies.items()}
        size = run.config.train.group_size
    command.console().print(scales(found, size))
    draw(found, folder / "noise.png", size)


if __name__ == "__main__":
    command.run(main, arguments=True)
