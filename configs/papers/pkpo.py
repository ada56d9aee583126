"""PKPO (2505.15201) and MaxRL (2602.02710) beside GRPO: is pass@8 bought with pass@1? 3 seeds each.

What: the quickstart with the weights of each method. PKPO's have the gradient of the best of k = 4
  attempts, so a solution counts the more, the rarer it is; MaxRL divides by the pass rate. Runs of
  a seed start from one warm start.
Command: python -m launch.sweep --config=configs/papers/pkpo.py --workdir=runs/papers/pkpo
Hardware: 2 CPU cores. Run time: 5 to 8 minutes a run beside another program.
Expected metric: held-out pass@8 90.6 -> 92.2 % with PKPO, 93.0 with MaxRL and 89.8 with GRPO, and
  pass@1 49.5 -> 62.8, 66.3 and 68.4; policy/entropy higher than with GRPO; one seed.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

ADVANTAGES = ("grpo", "pkpo", "maxrl")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant with GRPO. arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/papers/pkpo.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config(arg)
    config.train.advantage = ADVANTAGES[0]
    config.suites = config.suites[:1]
    if arg == "":
        config.train.update(steps=48)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name in ADVANTAGES:
            yield {"variant": name, "seed": seed, "train.advantage": name}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 5
    return (
        ("curve", "reward/solved", "step", window),
        ("curve", "reward/signal_groups", "step", window),
        ("curve", "policy/entropy", "step", window),
    )
