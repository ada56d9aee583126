"""Effects of optimising thumbs when voters are not users: a table and a figure.

python -m experiments.thumbs --workdir=runs/thumbs [--steps=100] [--seeds=3]

The workdir then holds thumbs.png. It takes a quarter of a minute on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

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
        kept = [float(one.retained[-_LAST:].mean()) for one in learned]
        up = [float(np.nanmean(one.thumbs_up[-_LAST:])) for one in learned]
        print(f"{name:24} retained {_interval(kept)}   thumbs up {_interval(up)}")
    given.workdir.mkdir(parents=True, exist_ok=True)
    draw(results, given.workdir / "thumbs.png")
    print(f"Figure: {given.workdir / 'thumbs.png'}")


def _interval(values: list[float]) -> str:
    mean, half = _mean_and_half(np.array(values)[:, None])
    return f"{mean[0]:.3f} ± {half[0]:.3f}"


def _mean_and_half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over seeds (rows) and half the width of its interval, by Student's t."""
    import scipy  # reads scipy.stats when it is first used, which takes most of a second

    seeds = len(values)
    quantile = scipy.stats.t.ppf((1 + LEVEL) / 2, seeds - 1)
    return values.mean(0), quantile * values.std(0, ddof=1) / np.sqrt(seeds)


def draw(results: dict[str, list[Learned]], path: Path) -> None:
    """Shares of suggestions kept and of thumbs up over the steps; bands are intervals."""
    import matplotlib  # slow to import, and only the end draws

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharex=True, sharey=True)
    width = 10  # steps that are averaged: a step has few votes
    for axis, field, label in (
        (axes[0], "retained", "share of tokens kept by all people"),
        (axes[1], "thumbs_up", "thumbs up, share of votes"),
    ):
        for name, learned in results.items():
            values = np.array([getattr(one, field) for one in learned])
            blocks = values.shape[1] // width
            cut = values[:, : blocks * width].reshape(len(values), blocks, width)
            mean, half = _mean_and_half(np.nanmean(cut, axis=2))
            at = width * (np.arange(blocks) + 0.5)
            (line,) = axis.plot(at, mean, label=f"reward: {name}")
            axis.fill_between(at, mean - half, mean + half, color=line.get_color(), alpha=0.2)
        axis.set(xlabel="step", title=label, ylim=(0, 1))
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
