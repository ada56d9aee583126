"""Ways to learn where hardly any episode succeeds, against plain GRPO, 3 seeds each.

What: the quickstart's agent is trained on functions of two steps, of which it solves about one in
  200: one in 250 demonstrations of its warm start has two steps, and the others have one. Each
  variant adds one thing to plain GRPO, from the same warm start. :base_agent begins with the agent
  of configs/base_agent.py, which was shown functions of one to three steps and solves one in 170 of
  four.
Command: python -m launch.sweep --config=configs/rare_success.py --workdir=runs/rare_success
  --figure=docs/rare_success.png
Hardware: 2 CPU cores. Run time: docs/results/rare_success.md.
Expected metric: held-out pass@1 on functions of two steps, 0.4 % before RL: 2.9 % with plain GRPO,
  3.9 with parts, 5.3 with refilled batches, 0.2 with partial credit, 2 with the others; one seed.
  milestones and maxrl are not run. :base_agent: 1.4 -> 1.4 with plain GRPO, 18.9 with
  imitated demonstrations.
"""

from collections.abc import Iterator

import ml_collections

from configs import base_agent, quickstart

# Demonstrations of one step, and of two. Without the latter no sample has two, and nothing is
# learned.
SEEN = (249, 1)
# Agent -> level of the tasks, and levels of its curriculum.
LEVELS = {"": (2, (1, 2)), "smoke": (2, (1, 2)), "base_agent": (6, (2, 3, 6))}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """Plain GRPO. arg: "" for the quickstart's agent, "base_agent", or "smoke" (seconds)."""
    if arg not in LEVELS:
        raise ValueError(f"configs/rare_success.py:{arg}: expected nothing, base_agent or smoke")
    hard, (easy, *_) = LEVELS[arg]
    if arg == "base_agent":
        config = base_agent.get_config("functions")
        # most groups have nothing to learn from: they are left out, and refill draws others
        config.train.pack.drop_uninformative = True
        config.train.loss.kl_coef = 0.0
    else:
        config = quickstart.get_config(arg)
        config.sft.tasks = dict(name="mixed", of=(functions(easy), functions(hard)), weights=SEEN)
    config.tasks = functions(hard)
    config.reward.signals = ("tests",)
    # a part of a task tells the step behind it too
    config.rollout.engine.prompt_length = 160
    config.suites = (quickstart.held_out("held_out", level=hard, count=64),)
    if arg == "smoke":
        config.suites[0].update(count=2, samples=2)
    else:
        config.train.update(steps=48)
    return config


def functions(*levels: int) -> dict:
    """Generated functions for training."""
    return dict(name="generated", split="train", levels=levels)


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One run for each seed and way; a way adds one thing to plain GRPO."""
    hard, levels = LEVELS[arg]
    ways = {
        "plain": {},
        "partial": {"reward.signals": ("tests", dict(name="partial", weight=0.2))},
        "milestones": {"milestones": {}, "train.advantage": "milestones"},
        "subtasks": {"tasks": dict(name="subtasks", of=functions(hard), by="steps")},
        "demonstrations": {"train.demonstrations": {}},
        "imitated": {"train.demonstrations": {}, "train.loss.demonstrated": "imitated"},
        "curriculum": {"tasks": functions(*levels), "train.curriculum": dict(by="level")},
        "pkpo": {"train.advantage": "pkpo"},
        "maxrl": {"train.advantage": "maxrl"},
        "refill": {"train.refill": dict(most=4)},
    }
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for variant, way in ways.items():
            yield {"variant": variant, "seed": seed} | way


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 5
    return (
        ("curve", "reward/solved", "step", window),
        ("curve", "reward/signal_groups", "step", window),
    )
