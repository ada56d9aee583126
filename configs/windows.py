"""On-policy data against data of older policies, on Tab, with as many updates in each.

What: configs/tab.py, 48 updates of one warm start for each seed. Each batch is sampled by the
  policy of 0, 3 or 15 updates before, and is used for one update, so that the runs differ in the
  age of their data alone. Its tokens count as if the policy had just sampled them, or are weighted
  by the ratio of the policies (the correction of stale data unless a config says otherwise).
Command: python -m launch.sweep --config=configs/windows.py --workdir=runs/windows, then
  python -m experiments.tab.windows runs/windows
Hardware: 2 CPU cores. Run time: see docs/results/tab.md.
Expected metric: what is earned on fresh holes after so many updates is less the older the data.
"""

from collections.abc import Iterator

import ml_collections

from configs import tab

UPDATES = 48
# Updates by which the policy that is trained is ahead of the one that sampled.
AGES = (0, 3, 15)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """On-policy. arg: "" or "smoke" (seconds)."""
    config = tab.get_config(arg)
    config.train.update(steps=_steps(0, arg))
    # the same for all, whatever the number of steps
    config.train.optimizer.update(schedule="constant")
    with config.unlocked():
        config.train.loss.correction = "none"
    return config


def _steps(age: int, arg: str) -> int:
    """Steps after which the policy of the last update has been measured: what a step samples tells
    of the policy that is ``age`` updates old.
    """
    return (4 if arg == "smoke" else UPDATES) + age + 1


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One run for each age, way of weighting and seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for age in AGES[:2] if arg == "smoke" else AGES:
            chosen = {
                "asynchrony.mode": "behind" if age else "sync",
                "asynchrony.max_staleness": age,
                "train.steps": _steps(age, arg),
            }
            yield {"variant": f"age {age}", "seed": seed} | chosen
            if age:
                weighted = {"train.loss.correction": "decoupled"}
                yield {"variant": f"age {age}, weighted", "seed": seed} | weighted | chosen
