"""Prints where a run of configs/tab_jumps.py sends people before reinforcement learning and after.

    python -m experiments.tab_jumps runs/tab_jumps [--moments=256]

The argument is the workdir of a run. Its model after the warm start and its last checkpoint answer
moments that nobody trained on, of the kinds of change that it was trained on and of those that are
held out, four times each. Nothing is trained.
"""

from __future__ import annotations

import jax
from absl import flags as absl_flags

from configs.tab_jumps import PEOPLE
from experiments.tab import held_out
from experiments.tab_jumps import report
from launch import command, flags
from rl_code import sft
from rl_code.recording import kept_config
from rl_code.run.config import meshes

_MOMENTS = absl_flags.DEFINE_integer("moments", 256, "Moments of each of the two splits.", 2)
# Answers to each.
_SAMPLES = 4


def main(argv: list[str]) -> None:
    folder = command.workdir_of(argv, "configs/tab_jumps.py")
    flags.use_virtual_devices(*meshes(kept_config.read(folder)))
    with held_out.opened(folder) as run, jax.set_mesh(run.mesh):
        last, step = run.saved_model(folder)
        models = {"after the warm start": sft.initial_model(run), f"after step {step}": last}
        samplers = {name: run.sampler(model) for name, model in models.items()}
        played = {
            (name, split): held_out.fill(
                run, sampler, report.moments(run, split, _MOMENTS.value), _SAMPLES
            )
            for split in ("train", "test")
            for name, sampler in samplers.items()
        }
    console = command.console()
    console.print(report.rates(played, PEOPLE), report.by_kind(played))
    console.print(report.rewards(played))


if __name__ == "__main__":
    command.run(main, arguments=True)
