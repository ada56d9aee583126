"""Tiny functions: a reward that is taken function by function, and one over the whole change.

What: the quickstart's agent on functions of two operations, which three in ten of its
  demonstrations split into two functions. It is paid by the tests alone, by the tests less the mean
  length of its functions ("per function"), or by the tests less what the whole change costs a
  reader ("whole change", ``quality``). Runs of a seed begin with one warm start.
Command: python -m launch.sweep --config=configs/tiny_functions.py --workdir=runs/tiny_functions
  --figure=docs/tiny_functions.png
Hardware: 2 CPU cores. Run time: 4 to 13 minutes beside other programs.
Expected metric: functions/split goes from 0.3 to 1 under the measure of functions, with 5 lines to
  read in place of 3.6, to 0 under that of the whole change, and stays at 0.3 under the tests alone;
  held-out pass@1 rises by 20 points in all three.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart
from configs.reward_signals import by_signal

_HERE = "experiments.tiny_functions"
SOURCE = dict(name=f"{_HERE}.source:Functions")
# Variant -> the signal beside the tests.
SIGNALS = {
    "tests": None,
    "per function": dict(name=f"{_HERE}.per_function:PerFunction", label="per_function"),
    "whole change": dict(name="quality", weight=0.5),
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant with tests alone. arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/tiny_functions.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config(arg)
    count, samples = (4, 2) if arg == "smoke" else (96, 4)
    held_out = dict(tasks=SOURCE | dict(split="test", seed=1), count=count, samples=samples)
    with config.ignore_type():
        config.tasks = SOURCE | dict(split="train")
        config.suites = (dict(name="held_out", **held_out),)
    # two functions are longer than one
    config.limits.update(turn_tokens=96)
    config.metrics = dict(extra=(f"{_HERE}.per_function:OfFunctions",))
    if arg == "":
        config.train.update(steps=48)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    yield from by_signal(SIGNALS, arg)


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    if arg == "smoke":  # nothing is solved in it, so there are no functions to count
        return (("curve", "reward/solved", "step", 1),)
    return (
        ("curve", "functions/split", "step", 5),
        ("curve", "functions/lines", "step", 5),
        ("curve", "reward/solved", "step", 5),
    )
