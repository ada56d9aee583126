"""GRPO against RLOO from one recorded step of the quickstart, in pairs with common random numbers.

What: a run of 40 steps with the advantages of GRPO. Then for each of six seeds two forks of it,
  which train 12 steps more: one goes on with GRPO, the other with RLOO. Both forks of a seed draw
  the same tasks and the same random numbers, in training and in the evaluation.
Command: python -m launch.train --config=configs/paired.py --workdir=runs/base, then
  python -m launch.sweep --config=configs/paired.py --workdir=runs/paired --fork=runs/base --step=40
Hardware: 2 CPU cores. Run time: see docs/results/paired.md.
Expected metric: the interval of the paired difference is narrower than that of the unpaired one.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The run that is forked. arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/paired.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config(arg)
    config.train.update(steps=_steps(arg)[0])
    # the learning rate falls as in the quickstart, wherever a run stops
    config.train.optimizer.update(total_steps=72)
    config.suites = config.suites[:1]
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; both runs of a seed before the next seed."""
    base, more = _steps(arg)
    for seed in range(2 if arg == "smoke" else 6):
        for advantage in ("grpo", "rloo"):
            yield {
                "variant": advantage,
                "seed": seed,
                "train.advantage": advantage,
                "train.steps": base + more,
            }


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (("curve", "reward/solved", "step", 5),)


def _steps(arg: str) -> tuple[int, int]:
    """Steps of the run that is forked, and steps of each fork."""
    return (2, 1) if arg == "smoke" else (40, 12)
