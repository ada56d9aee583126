"""Ways to learn where hardly any episode succeeds, against plain GRPO, 3 seeds each.

What: the quickstart's agent is trained on functions of two steps, of which it solves about one in
  200: one in 250 demonstrations of its warm start has two steps, and the others have one. Each
  variant adds one thing to plain GRPO, from the same warm start.
Command: python -m launch.sweep --config=configs/rare_success.py --workdir=runs/rare_success
  --figure=docs/rare_success.png
Hardware: 2 CPU cores. Run time: docs/results/rare_success.md.
Expected metric: held-out pass@1 on functions of two steps, 0.4 % before RL: 2.9 % with plain GRPO,
  3.9 with parts, 5.3 with refilled batches, 0.2 with partial credit, 2 with the others; one seed.
  milestones and maxrl are not run.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

HARD = dict(name="generated", split="train", levels=(2,))
# Demonstrations of one step, and of two. Without the latter no sample has two, and nothing is
# learned.
SEEN = (249, 1)
# Variant -> what it adds.
WAYS = {
    "plain": {},
    "partial": {"reward.signals": ("tests", dict(name="partial", weight=0.2))},
    "milestones": {"milestones": {}, "train.advantage": "milestones"},
    "subtasks": {"tasks": dict(name="subtasks", of=HARD, by="steps")},
    "demonstrations": {"train.demonstrations": {}},
    "curriculum": {
        "tasks": HARD | dict(levels=(1, 2)),
        "train.curriculum": dict(by="level"),
    },
    "pkpo": {"train.advantage": "pkpo"},
    "maxrl": {"train.advantage": "maxrl"},
    "refill": {"train.refill": dict(most=4)},
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Plain GRPO. arg: "" or "smoke" (seconds)."""
    config = quickstart.get_config(arg)
    easy = dict(name="generated", split="train", levels=(1,))
    config.tasks = HARD
    config.sft.tasks = dict(name="mixed", of=(easy, HARD), weights=SEEN)
    config.reward.signals = ("tests",)
    # a part of a task tells the step behind it too
    config.rollout.engine.prompt_length = 160
    config.suites = (quickstart.held_out("held_out", level=2, count=64),)
    if arg == "smoke":
        config.suites[0].update(count=2, samples=2)
    else:
        config.train.update(steps=48)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One run for each variant and seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name, added in WAYS.items():
            yield {"variant": name, "seed": seed} | added


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 5
    return (
        ("curve", "reward/solved", "step", window),
        ("curve", "reward/signal_groups", "step", window),
    )
