"""Measures how good a match is among those that the warm-started model shows, and how lenient
people must be so that they accept of them the share that was accepted of the recorded suggestions.

    python -m experiments.tab.calibrate runs/tab/seed=0 --reading=experiments/tab/reading.json

The argument is the workdir of a run of configs/tab.py whose warm start has finished.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
from absl import flags as absl_flags

from experiments.tab import held_out
from experiments.tab.asked import CALIBRATED
from experiments.tab.calibration import RECORDED, reading, shown_by
from launch import command, flags
from rl_code import sft
from rl_code.recording import kept_config
from rl_code.run.config import meshes

_READING = absl_flags.DEFINE_string("reading", str(CALIBRATED), "The file that is written.")


def main(argv: list[str]) -> None:
    folder = command.workdir_of(argv, "configs/tab.py")
    flags.use_virtual_devices(*meshes(kept_config.read(folder)))
    with held_out.opened(folder) as run, jax.set_mesh(run.mesh):
        sampler = run.sampler(sft.initial_model(run))
        groups = held_out.fill(run, sampler, held_out.holes(run, 256), 4)
    shown = shown_by(groups)
    found = reading(shown)
    fields = {"matches": list(found.matches), "leniency": found.leniency}
    Path(_READING.value).write_text(json.dumps(fields, indent=1) + "\n")
    print(f"{len(shown)} suggestions: leniency {found.leniency:+.3f}, accepted {RECORDED:.1%}")


if __name__ == "__main__":
    command.run(main, arguments=True)
