"""Few tasks played often against many tasks played once, at equal episodes, 3 seeds each.

What: the quickstart's agent is trained on the first n tasks of a stream of functions of two steps.
  Every step has 128 episodes, as groups of 4, 8 or 32. So a run of 48 steps plays each of 8 tasks
  768 times, each of 64 tasks 96 times, and of 2,048 tasks none twice with groups of 8 or 32. Runs
  of a seed begin with one warm start, which has seen none of these tasks.
Command: python -m launch.sweep --config=configs/scarce_data.py --workdir=runs/scarce_data
  --figure=docs/scarce_data.png
Hardware: 2 CPU cores. Run time: 6 to 13 minutes a run beside other programs.
Expected metric: with 8 tasks reward/solved reaches 0.98 and held-out pass@1 gains 7 points, with
  2,048 0.78 and 22 points, in groups of 8; one seed. The other sizes are not run.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

# Tasks there are, and episodes of a group.
TASKS = (8, 64, 2048)
GROUPS = (4, 8, 32)
EPISODES = 128


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The middle of the surface. arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/scarce_data.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config(arg)
    with config.ignore_type():
        config.tasks = first(TASKS[1])
        # what is demonstrated is no part of what is scarce
        config.sft.tasks = dict(name="generated", split="train", levels=(1, 2, 2), seed=1)
    config.suites = config.suites[:1]
    if arg == "smoke":
        config.tasks.count = 8
    else:
        config.train.update(steps=48)
        config.suites[0].update(samples=4)
    return config


def first(count: int) -> dict:
    """The first tasks of a stream."""
    stream = dict(name="generated", split="train", levels=(2,))
    return dict(name="first", of=stream, count=count)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    episodes, counts, sizes = (16, (4, 8), (4, 8)) if arg == "smoke" else (EPISODES, TASKS, GROUPS)
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for count in counts:
            for size in sizes:
                yield {
                    "variant": f"{count} tasks, groups of {size}",
                    "seed": seed,
                    "tasks": first(count),
                    "train.tasks_per_step": episodes // size,
                    "train.group_size": size,
                }


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 5
    return (
        ("curve", "reward/solved", "step", window),
        ("curve", "reward/signal_groups", "step", window),
        ("curve", "policy/entropy", "step", window),
    )
