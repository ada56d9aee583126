"""Tab: a small model fills holes in Python files, and learns when to suggest nothing.

What: fill-in-the-middle from scratch, a warm start on imperfect demonstrations, then GRPO on what
  simulated programmers do: +0.75 for an acceptance, -0.25 for a rejection, 0 for nothing shown. The
  programmers are fitted on recorded decisions (people/simulated). In one file of four the comment
  does not say what is wanted; there nothing should be shown.
Command: python -m launch.train --config=configs/tab.py --workdir=runs/tab, then
  python -m experiments.tab runs/tab. Three seeds: python -m launch.sweep --config=configs/tab.py
Hardware: 2 CPU cores. Run time: see docs/results/tab.md.
Expected metric: tab/accepted rises and tab/shown falls, both at once.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/tab.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config(arg)
    with config.ignore_type():
        config.tools = ("suggest",)
        # /v1/completions with ``suffix`` puts a hole to the model as the protocol does
        config.serving = dict(fill_in=dict())
    config.protocol = "infill"
    config.tasks = holes(seed=2)
    config.limits = dict(turns=1, tokens=128, turn_tokens=24, test_runs=0, command_s=5.0)
    config.reward.signals = (asked(),)
    config.metrics = dict(extra=(dict(name="experiments.tab.metrics:Tab", asked=HABITS),))
    config.rollout.engine.update(prompt_length=104)
    config.suites = ()
    # One device: on two virtual ones a step of so small a model is mostly waiting.
    config.mesh.update(data=1)
    with config.ignore_type():
        # One warm start for all seeds: their reinforcement learning is on files of their own.
        config.sft.tasks = holes(seed=0)
        config.train.advantage = "dr_grpo"
    config.train.pack.update(targets=96)
    config.train.micro_batches = 2
    if arg == "":
        config.sft.update(steps=240, checkpoint_every=80)
        config.train.update(steps=120)
        config.train.optimizer.learning_rate = 8e-4
        config.checkpoint.update(every=10)
    return config


# Share of the files whose comment does not say what is wanted. Of the recorded suggestions a third
# was accepted.
SILENT = 0.4
# Which simulator trains; others judge (docs/results/tab.md).
HABITS = dict(habits="particular", people=64, seed=0)


def holes(seed: int) -> dict:
    """The files of a seed. Seed 0 is for demonstrations, and 1 for what is compared in the end."""
    return dict(name="infill", split="train", seed=seed, levels=(1, 2, 3), silent=SILENT)


def asked() -> dict:
    """The reward: what a simulated programmer does with the suggestion."""
    return dict(name="experiments.tab.asked:Asked", label="asked", **HABITS)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One run per seed."""
    for seed in (2,) if arg == "smoke" else (2, 3, 4):
        yield {"tasks.seed": seed}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 5
    names = ("shown", "accepted", "needless", "shown_unknowable")
    return tuple(("curve", f"tab/{name}", "step", window) for name in names)
