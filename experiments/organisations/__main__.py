"""Prints what each adapter earns at each organisation, and checks that none saw another's data.

    python -m experiments.organisations runs/organisations [--holes=96]
    python -m experiments.organisations runs/organisations --figure=docs/organisations.png

runs/organisations is the workdir of a sweep over configs/organisations.py. The adapters of a seed
are served beside each other, as several of one model, and fill the same held-out holes of both
organisations. Nothing is trained.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags as absl_flags

from configs.organisations import ORGANISATIONS
from experiments.organisations import isolation, report
from launch import command, flags
from rl_code.recording import kept_config
from rl_code.run.config import meshes
from sweeps import DONE

_HOLES = absl_flags.DEFINE_integer("holes", 96, "Held-out holes of each organisation.", 2)


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        command.refuse("name the workdir of a sweep, as in python -m experiments.organisations a")
    folder = Path(argv[1])
    seeds = report.finished(folder, ORGANISATIONS)
    if not seeds:
        command.refuse(f"{folder} holds no seed whose three runs have finished ({DONE} in each)")
    first = next(iter(seeds.values()))["shared"]
    flags.use_virtual_devices(*meshes(kept_config.read(first)))
    for seed, runs in seeds.items():
        isolation.check(runs)
        print(f"{seed}: no episode of one organisation in another's training, one base model")
    played = [report.play(runs, ORGANISATIONS, _HOLES.value) for runs in seeds.values()]
    command.console().print(report.rewards(played, ORGANISATIONS))
    if figure := absl_flags.FLAGS.figure:
        report.draw(played, ORGANISATIONS, Path(figure))


def define_flags() -> None:
    """Other commands have a flag of this name, so it is defined where this one is run."""
    absl_flags.DEFINE_string("figure", None, "The file of the figure.")


if __name__ == "__main__":
    define_flags()
    command.run(main, arguments=True)
