"""Forks a run: another run that shares its record up to a step, and goes on with another config.

    python -m launch.fork runs/a --step=400 --workdir=runs/b --config.train.loss.correction=none

The config is that of runs/a, with the changes that are given. Nothing of runs/a is changed, and no
group is copied: both runs have the same files, and either may delete its own. Where runs/a has no
checkpoint of the step, training is repeated from the one before. Then, as for any other run,

    python -m launch.train --config=runs/b/config.json --workdir=runs/b

What runs/a planned and sampled from the step on is taken over only if the change cannot have
affected it. The model, the tokenizer and the warm start cannot change.
"""

from __future__ import annotations

from pathlib import Path

import ml_collections
from absl import flags as absl_flags

from launch import command, flags, trusted
from launch.step import STEP
from rl_code.config import read_config
from rl_code.environment.sandbox.pool import SandboxUnavailable
from rl_code.host.stop import StopRequest
from rl_code.recording import kept_config
from rl_code.recording.fork import fork
from rl_code.run import lineage
from rl_code.run.config import RunConfig, meshes
from rl_code.store.errors import StoreError
from rl_code.weights.versions import WeightError

OTHER_BITS = absl_flags.DEFINE_bool(
    "other_bits",
    False,
    "Updates need not repeat those of the run bit for bit, as on another processor or with a "
    "mended bug; the fork's report says from which step on.",
)
RESAMPLE = absl_flags.DEFINE_bool(
    "resample",
    False,
    "Take over nothing that was sampled beyond the step, as after a change of code.",
)


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    parent = flags.run_folder()
    if parent is None:
        raise read_config.ConfigError(
            "name the run to fork first, as in python -m launch.fork runs/a --step=400 "
            "--workdir=runs/b"
        )
    run_config = read_config.build(RunConfig, config)
    # The parent's updates may be repeated here, on the meshes that they were made on.
    configs = [run_config, *lineage.configs(Path(parent), kept_config.read(Path(parent)))]
    used = [meshes(config, "learner") for config in configs]
    flags.use_virtual_devices(*max(used, key=flags.devices_of))
    with StopRequest():  # SIGTERM ends it as Ctrl-C does, and removes the draft
        made = fork(
            Path(parent),
            Path(workdir),
            STEP.value,
            run_config,
            other_bits=OTHER_BITS.value,
            resample=RESAMPLE.value,
        )
    console = flags.console()
    for what, value in made.fork.facts():
        console.print(f"{what}: {value}", soft_wrap=True, highlight=False, markup=False)
    if made.before:
        console.print(f"{workdir} is this fork already")
    else:
        shared = made.shared
        console.print(
            f"shared: {shared.steps} steps, {shared.groups} groups, {shared.bytes / 1e6:.1f} MB; "
            f"taken over from step {made.fork.step} on: {shared.beyond} groups",
            soft_wrap=True,
        )
    console.print(
        "Next: "
        + command.shown(
            "launch.train",
            f"--config={workdir}/config.json",
            f"--workdir={workdir}",
            *trusted.passed_on(),
        ),
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


if __name__ == "__main__":
    flags.run(
        main, kind=RunConfig, runs=True, expected=(SandboxUnavailable, StoreError, WeightError)
    )
