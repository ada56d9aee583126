"""Gated delta nets in three of four layers of the quickstart, beside dense attention, 3 seeds each.

What: the quickstart's model of 1 M parameters, and the same with a recurrent state in place of keys
  in all layers but the last (``attention/methods/gated_delta.py``, as in Qwen3-Next), everything
  else alike.
Command: python -m launch.sweep --config=configs/quickstart_delta.py --workdir=runs/delta
Hardware: 2 CPU cores. Run time: docs/results/delta.md.
Expected metric: held-out pass@1 rises by as much as with dense attention, within 3 points. Seed 2
  misses that: +20.5, +25.7 and +10.1 for +23.5, +25.8 and +23.8.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart

ATTENTION = ("gated_delta", "gated_delta", "gated_delta", "dense")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    config = quickstart.get_config(arg)
    with config.unlocked():
        config.model.attention = ATTENTION
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; both variants of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for variant, attention in (("gated delta", ATTENTION), ("dense", ("dense",))):
            yield {"variant": variant, "seed": seed, "model.attention": attention}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 5
    metrics = ("reward/solved", "reward/signal_groups", "policy/entropy", "policy/mismatch_mean")
    return tuple(("curve", metric, "step", window) for metric in metrics)
