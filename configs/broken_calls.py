"""Broken tool calls that are left out of training, and then counted.

What: functions to write from a few words in one message; half of the tasks do not state a constant,
  so they can only be guessed. One demonstration of ten has a broken call. All variants of a seed
  begin with the same warm start and the same reward, 1 for a solved task; credit is the reward
  minus 2/3. A variant leaves episodes with a broken call out of training; one counts them as
  failures that also cost 0.1; one leaves them out, with the mean of a group as its baseline.
Command: python -m launch.sweep --config=configs/broken_calls.py --workdir=runs/broken_calls
Hardware: 2 CPU cores. Run time: see docs/results/broken_calls.md.
Expected metric: calls/broken_unclear nears 1 where broken calls are left out, and 0 where they are
  counted.
"""

from collections.abc import Iterator
from typing import Any

import ml_collections

from configs import quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant that leaves broken calls out. arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/broken_calls.py:{arg}: the argument must be empty or smoke")
    config = from_words(
        arg,
        steps=160,
        updates=24,
        tasks_per_step=12,
        group_size=4,
        unclear="open",
        right=0.95,
        broken=0.1,
    )
    config.limits = dict(turns=1, tokens=80, turn_tokens=48, test_runs=0, command_s=5.0)
    config.reward.signals = ("tests", dict(name="malformed", weight=0.1))
    config.metrics = dict(extra=("experiments.incidents.broken_calls:BrokenCalls",))
    with config.ignore_type():
        config.train.update(advantage=credited(drop=True))
    return config


def from_words(
    arg: str, steps: int, updates: int, tasks_per_step: int, group_size: int, **tasks: Any
) -> ml_collections.ConfigDict:
    """The agent of both incidents, which writes functions from a few words.

    steps: of the warm start. updates, tasks_per_step, group_size: of training. tasks: settings of
    ``FromWords``.
    """
    config = quickstart.get_config(arg)
    with config.ignore_type():
        config.tools = ("write_file", "run_tests", "submit")
    config.mesh.update(data=1)
    name = "experiments.incidents.tasks:FromWords"
    config.tasks = dict(name=name, split="train", levels=(1,), **tasks)
    config.suites = ()
    config.rollout.engine.update(prompt_length=32)
    config.train.update(micro_batches=2)
    config.train.pack.update(targets=192)
    config.sft.update(rows=12, slots=64)
    if arg == "":
        config.sft.update(steps=steps, checkpoint_every=steps)
        config.train.update(steps=updates, tasks_per_step=tasks_per_step, group_size=group_size)
        config.checkpoint.update(every=updates)
    return config


# A right answer is credited with 1/3 and a wrong one with -2/3: it costs the person twice of what a
# right one is worth, as in configs/questions.py.
BASELINE = 2 / 3


def credited(drop: bool, baseline: float | None = BASELINE) -> dict:
    """The credit of episodes."""
    name = "experiments.incidents.broken_calls:Credited"
    return dict(name=name, drop=drop, baseline=baseline)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; every variant of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for variant, credit in (
            ("dropped", credited(drop=True)),
            ("counted", credited(drop=False)),
            ("dropped, group mean", credited(drop=True, baseline=None)),
        ):
            yield {"variant": variant, "seed": seed, "train.advantage": credit}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 3
    names = ("broken_unclear", "broken_clear", "solved_unclear", "solved_clear")
    return tuple(("curve", f"calls/{name}", "step", window) for name in names)
