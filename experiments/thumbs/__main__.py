"""Effects of optimising thumbs when voters are not users: a table and a figure.

python -m experiments.thumbs --workdir=runs/thumbs [--steps=100] [--seeds=3]

The workdir then holds thumbs.png. It takes a quarter of a minute on one core.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from experiments.report import band, figure, student
from experiments.thumbs.study import RUNS, Learned, ThumbsStudy, run
from launch import command
from launch.workdir import WORKDIR
from rl_code.evaluation.passk import LEVEL

FLAGS = flags.FLAGS
# Steps at the end over which the table takes means.
_LAST = 20


def main(argv: list[str]) -> None:
    if not WORKDIR.value:
        command.refuse("--workdir=<folder> is missing, for instance --workdir=runs/thumbs")
    study = ThumbsStudy(steps=FLAGS.steps)
    results = {name: [run(study, name, seed) for seed in range(FLAGS.seeds)] for name in RUNS}
    print(f"means of the last {_LAST} steps, {FLAGS.seeds} seeds, {LEVEL:.0%} intervals")
    for name, learned in results.items():
        kept = student([one.retained[-_LAST:].mean() for one in learned])
        up = student([np.nanmean(one.thumbs_up[-_LAST:]) for one in learned])
        print(f"{name:24} retained {kept.told('.3f')}   thumbs up {up.told('.3f')}")
    folder = Path(WORKDIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    draw(results, folder / "thumbs.png")


def draw(results: dict[str, list[Learned]], path: Path) -> None:
    """Shares of suggestions kept and of thumbs up over the steps; bands are intervals."""
    width = 10  # steps that are averaged: a step has few votes
    with figure(path, 10, 4, 1, 1) as axes:
        for axis, field, title in (
            (axes[0], "retained", "share of tokens kept by all people"),
            (axes[1], "thumbs_up", "thumbs up, share of votes"),
        ):
            for name, learned in results.items():
                values = np.array([getattr(one, field) for one in learned])
                blocks = values.shape[1] // width
                cut = values[:, : blocks * width].reshape(len(values), blocks, width)
                at = width * (np.arange(blocks) + 0.5)
                band(axis, at, student(np.nanmean(cut, axis=2)), label=f"reward: {name}")
            axis.set(xlabel="step", title=title, ylim=(0, 1))


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    flags.DEFINE_integer("steps", ThumbsStudy.steps, "Updates of the policy.", 1)
    flags.DEFINE_integer("seeds", 3, "Runs of each reward.", 2)


if __name__ == "__main__":
    define_flags()
    command.run(main)
