"""On-policy data against windows of old data, on Tab, with as many updates in each.

What: configs/tab.py, 48 updates of one warm start for each seed. A window is what is sampled at
  once and then trained on k times, as a cycle does that seldom collects: at its end the data are
  k - 1 updates old. They are weighted by the ratio of the policies, clipped (PPO) or not.
Command: python -m launch.sweep --config=configs/windows.py --workdir=runs/windows, then
  python -m experiments.tab.windows runs/windows
Hardware: 2 CPU cores. Run time: see docs/results/tab.md.
Expected metric: what is earned on fresh holes after so many updates is less the longer the window,
  and least where nothing is clipped (over-optimisation).
"""

from collections.abc import Iterator

import ml_collections

from configs import tab

UPDATES = 48
WINDOWS = (1, 4, 16)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """On-policy. arg: "" or "smoke" (seconds)."""
    config = tab.get_config(arg)
    # the last step only measures what the updates before it came to
    config.train.update(steps=_steps(1, arg))
    # the same for all, whatever the number of steps
    config.train.optimizer.update(schedule="constant")
    with config.ignore_type():  # a name becomes a section, whose bounds the sweep sets
        config.train.loss.policy = dict(name="ppo", clip_low=0.2, clip_high=0.28)
    return config


def _steps(window: int, arg: str) -> int:
    return (4 if arg == "smoke" else UPDATES) // window + 1


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One run for each window, way of weighting and seed."""
    free = {"train.loss.policy.clip_low": 1.0, "train.loss.policy.clip_high": 1e6}
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for window in (1, 4) if arg == "smoke" else WINDOWS:
            chosen = {"train.epochs": window, "train.steps": _steps(window, arg)}
            yield {"variant": f"window {window}", "seed": seed} | chosen
            if window > 1:
                name = f"window {window}, unclipped"
                yield {"variant": name, "seed": seed} | free | chosen
