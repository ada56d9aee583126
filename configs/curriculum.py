"""A curriculum against drawing all tasks alike, from the same warm start, 3 seeds each.

What: the quickstart on functions of three levels. The curriculum draws a level the more often, the
  more of its groups are mixed by the policy's own pass rate: neither all solved nor none.
Command: python -m launch.sweep --config=configs/curriculum.py --workdir=runs/curriculum
  --figure=docs/curriculum.png
Hardware: 2 CPU cores. Run time: docs/results/curriculum.md.
Expected metric: held-out pass@1 of each level rises by 8 to 14 points with and without it, since
  all levels have mixed groups
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

LEVELS = (1, 2, 3)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant with a curriculum. arg: "" or "smoke" (seconds)."""
    config = quickstart.get_config(arg)
    config.tasks.levels = LEVELS
    config.train.curriculum = dict(by="level")
    config.suites = tuple(
        quickstart.held_out(f"level_{level}", level, 64) | dict(samples=4) for level in LEVELS
    )
    if arg == "smoke":
        for suite in config.suites:
            suite.update(count=2, samples=2)
    else:
        config.train.update(steps=48)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name, evenly in (("alike", 1.0), ("curriculum", 0.2)):
            yield {"variant": name, "seed": seed, "train.curriculum.evenly": evenly}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (
        ("curve", "reward/mixed_groups", "step", 5),
        ("curve", "reward/solved", "step", 5),
        ("curve", "tasks/share_1", "step", 5),
        ("curve", "tasks/share_3", "step", 5),
    )
