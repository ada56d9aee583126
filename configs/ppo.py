"""PPO with a value function beside GRPO, on the quickstart's tasks.

What: the quickstart with advantages by GAE instead of the group's mean (PPO, 1707.06347; GAE,
  1506.02438). The value function is a head on the policy's backbone, or a copy of the policy with
  an optimizer of its own. It is trained on the returns of the first policy for a few steps before
  that is updated, and lambda is 1 (VC-PPO, 2503.01491). In one arm the policy's lambda follows the
  length (VAPO, 2504.05118), which makes it 0.8 for these short episodes. A step without an update
  of the policy counts as a step of all.
Command: python -m launch.train --config=configs/ppo.py:separate --workdir=runs/ppo, or all arms
  with three seeds by python -m launch.sweep --config=configs/ppo.py --workdir=runs/ppo_grpo
Hardware: 2 CPU cores. Run time: docs/results/ppo.md.
Expected metric: held-out pass@1 rises as with GRPO at equal steps (48 to 70 %), and not with a
  lambda of 0.8; value/explained_variance rises to about 0.5 with a separate backbone
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

PRETRAIN_STEPS = 4
VALUE = dict(
    optimizer=dict(learning_rate=1e-3, warmup_steps=5),
    pretrain_steps=PRETRAIN_STEPS,
    pretrain_epochs=8,
    clip=0.5,
)
VALUES = {
    "shared": VALUE | dict(backbone="shared", coef=0.1),
    "separate": VALUE | dict(backbone="separate"),
}
ADVANTAGE = dict(name="gae", lam=1.0)
# 1 / (alpha l) is 0.2 for 50 sampled tokens
BY_LENGTH = dict(name="gae", length_alpha=0.1)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" for GRPO, "shared" or "separate" for PPO, or "smoke" (PPO, seconds)."""
    if arg not in ("", "smoke", *VALUES):
        raise ValueError(
            f"configs/ppo.py:{arg}: expected nothing, smoke or one of {', '.join(VALUES)}"
        )
    config = quickstart.get_config("smoke" if arg == "smoke" else "")
    # groups of equal rewards, which GRPO learns nothing from, count for a value function
    config.train.pack.drop_uninformative = False
    config.suites = config.suites[:1]
    with config.ignore_type():
        config.evaluate = dict(every=1 if arg == "smoke" else 12)
    config.checkpoint.update(every=config.evaluate.every)
    if arg != "smoke":
        config.train.update(steps=48)
        config.suites[0].update(count=96, samples=4)
    if arg:
        with config.train.ignore_type():
            config.train.value = VALUES.get(arg, VALUES["shared"])
            config.train.advantage = ADVANTAGE
    if arg == "smoke":
        config.train.value.update(pretrain_steps=1, pretrain_epochs=2)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all ways of a seed before the next seed."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/ppo.py:{arg}: the sweep is that of configs/ppo.py")
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        if not arg:  # a run with values cannot be one without them by an override
            yield {"variant": "grpo", "seed": seed, "train.advantage": "grpo"}
        for variant, value in VALUES.items():
            own = {"train.advantage": ADVANTAGE, "train.value": value}
            yield {"variant": variant, "seed": seed} | own
        own = {"train.advantage": BY_LENGTH, "train.value": VALUES["separate"]}
        yield {"variant": "separate, lambda by length", "seed": seed} | own


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (
        ("curve", "reward/solved", "step", 5),
        ("curve", "reward/solved", "minutes", 5),
        ("curve", "value/explained_variance", "step", 5),
    )
