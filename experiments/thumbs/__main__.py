"""Effects of optimising thumbs when voters are not users: a table and a figure.

python -m experiments.thumbs --workdir=runs/thumbs [--steps=100] [--seeds=3]

The workdir then holds thumbs.png. It takes a quarter of a minute on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from experiments.report import band, figure, student
from experiments.thumbs.study import RUNS, Learned, ThumbsStudy, run
from rl_code.evaluation.passk import LEVEL

# Steps at the end over which the table takes means.
_LAST = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=ThumbsStudy.steps)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    study = ThumbsStudy(steps=given.steps)
    results = {name: [run(study, name, seed) for seed in range(given.seeds)] for name in RUNS}
    print(f"means of the last {_LAST} steps, {given.seeds} seeds, {LEVEL:.0%} intervals")
    for name, learned in results.items():
        kept = student([one.retained[-_LAST:].mean() for one in learned])
        up = student([np.nanmean(one.thumbs_up[-_LAST:]) for one in learned])
        print(f"{name:24} retained {kept.told('.3f')}   thumbs up {up.told('.3f')}")
    given.workdir.mkdir(parents=True, exist_ok=True)
    draw(results, given.workdir / "thumbs.png")


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


if __name__ == "__main__":
    main()
