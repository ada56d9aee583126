"""Synchronous against asynchronous training on the embedded tasks, with and without correction, 3
seeds each.

What: the quickstart with 24 steps, sampled in turn with learning (sync), one step ahead, or while
  weights change in the middle of messages, at most 2 or 4 versions behind. Stale data are weighted
  by the decoupled loss or, "uncorrected", not at all. In sync both devices sample and then both
  learn; in the others one samples while the other learns.
Command: python -m launch.sweep --config=configs/asynchrony.py --workdir=runs/asynchrony
Hardware: 2 CPU cores with nothing else on them, for the times. Run time: about an hour for 21 runs,
  of which 15 take over a warm start; sync makes its own, as sums over two devices round
  differently.
Expected metric: per step, corrected, rewards within the seeds of sync; uncorrected, less at k=4.
  Per minute, no order: the first step compiles, which its time includes, and while it does
  asynchronous variants sample up to k steps.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """One step ahead. arg: "" or "smoke" (seconds)."""
    config = quickstart.get_config(arg)
    steps = 6 if arg == "smoke" else 24
    config.mesh.update(data=1)
    config.rollout.update(apart=True)
    config.train.update(steps=steps)
    config.suites = config.suites[:1]
    if arg != "smoke":
        config.suites[0].update(samples=4)
        config.checkpoint.update(every=12)
    # old enough for every variant of the sweep
    config.asynchrony = dict(mode="one_step", max_staleness=1, weights=dict(keep=6))
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; every variant of a seed before the next seed, which spreads the
    machine's moods.
    """
    together = {"mesh.data": 2, "rollout.apart": False}
    ahead = {
        "one step": ("one_step", 1),
        "in flight k=2": ("in_flight", 2),
        "in flight k=4": ("in_flight", 4),
    }
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        yield {"variant": "sync", "seed": seed} | schedule("sync", 0) | together
        for name, (mode, bound) in ahead.items():
            yield {"variant": name, "seed": seed} | schedule(mode, bound)
            uncorrected = {"train.loss.correction": "none"}
            yield (
                {"variant": f"{name}, uncorrected", "seed": seed}
                | schedule(mode, bound)
                | uncorrected
            )


def schedule(mode: str, bound: int) -> dict:
    """Overrides that let sampling run ``bound`` versions ahead."""
    return {
        "asynchrony.mode": mode,
        "asynchrony.max_staleness": bound,
    }


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (
        ("curve", "reward/solved", "step", 5),
        ("curve", "reward/solved", "minutes", 5),
        ("bars", "time/learner_idle", "time/actor_idle", "time/actor_waits"),
        ("histogram", "staleness/"),
    )
