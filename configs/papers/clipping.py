"""Bounds of the ratio between two policies: those of GRPO, DAPO, GSPO and CISPO, 3 seeds each.

What: the quickstart with three updates on each batch, so that the ratio leaves 1 and its bounds
  take hold. GRPO clips each token to [0.8, 1.2] and averages over trajectories (2402.03300). DAPO
  has the upper bound 1.28, averages over tokens, draws further tasks in place of groups without a
  signal and makes long episodes pay (2503.14476). GSPO clips the ratio
  of the whole trajectory (2507.18071), CISPO the weight of a token and not its gradient
  (2506.13585). All variants of a seed start from one warm start.
Command: python -m launch.sweep --config=configs/papers/clipping.py --workdir=runs/papers/clipping
  runs all four; configs/papers/clipping.py:dapo runs DAPO and GRPO alone, and so do gspo and cispo.
Hardware: 2 CPU cores. Run time: 6 to 13 minutes a run beside other programs.
Expected metric: held-out pass@1 49.5 -> 73.2 % with GRPO, 67.1 with DAPO, 71.6 with GSPO and 59.8
  with CISPO, and policy/entropy 0.048, 0.069, 0.053 and 0.039 at the end; one seed.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

# name of the loss, bounds of the ratio, aggregation, groups without a signal left out
VARIANTS = {
    "grpo": ("ppo", 0.2, 0.2, "sequence", False),
    "dapo": ("ppo", 0.2, 0.28, "token", True),
    # with the bounds of section 5.1 of the paper
    "gspo": ("gspo", 3e-4, 4e-4, "sequence", True),
    "cispo": ("cispo", 1.0, 0.28, "token", True),
}
# What a variant has beside them.
BESIDE = {
    "dapo": {
        "train.refill": dict(most=2),
        "reward.signals": (
            "tests",
            dict(name="malformed", weight=0.1),
            dict(name="overlong", weight=0.1),
        ),
    },
}
# The variant that the others are compared with.
BASE = "grpo"


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" for all variants, one of VARIANTS for it and GRPO, or "smoke" (seconds)."""
    if arg not in ("", "smoke", *VARIANTS):
        known = ", ".join(VARIANTS)
        raise ValueError(
            f"configs/papers/clipping.py:{arg}: expected nothing, smoke or one of {known}"
        )
    smoke = arg == "smoke"
    config = quickstart.get_config("smoke" if smoke else "")
    # the ratio of the first update on a batch is 1
    config.train.update(epochs=3)
    with config.ignore_type():  # a name becomes a section, whose keys the sweep sets
        config.train.loss.policy = dict(name="ppo", clip_low=0.2, clip_high=0.28)
    if not smoke:
        config.train.update(steps=48)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    names = dict.fromkeys((BASE, arg)) if arg in VARIANTS else VARIANTS
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name in names:
            yield (
                {"variant": name, "seed": seed} | overrides(*VARIANTS[name]) | BESIDE.get(name, {})
            )


def overrides(loss: str, low: float, high: float, aggregation: str, drop: bool) -> dict:
    """Overrides of a variant."""
    return {
        "train.loss.policy.name": loss,
        "train.loss.policy.clip_low": low,
        "train.loss.policy.clip_high": high,
        "train.loss.aggregation": aggregation,
        "train.pack.drop_uninformative": drop,
    }


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (
        ("curve", "reward/solved", "step", 5),
        ("curve", "policy/entropy", "step", 5),
        ("curve", "policy/clip_fraction", "step", 5),
    )
