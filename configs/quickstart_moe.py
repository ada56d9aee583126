"""The quickstart with a mixture of experts, at equal multiplications per token, 3 seeds each.

What: the quickstart's model of 1 M parameters against one whose layers have 8 experts, of which 2
  compute a token (2.7 M parameters, of which 0.9 M compute a token); experts are balanced by a
  loss, and in the sweep those that were chosen while sampling are replayed in training.
Command: python -m launch.sweep --config=configs/quickstart_moe.py --workdir=runs/moe
Hardware: 2 CPU cores. Run time: not measured on quiet cores; a step of the experts is longer than a
  dense one.
Expected metric: held-out pass@1 rises by 24 to 27 points with experts in three seeds; the dense
  model gains 24 to 26 (docs/results/experts.md).
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    config = quickstart.get_config(arg)
    config.model.update(preset="tiny_moe", balance_loss=0.01)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run."""
    variants = (
        {"rollout.picks": "replay"},
        {"model.preset": "tiny", "model.balance_loss": 0.0},
    )
    for variant in variants:
        for seed in (0,) if arg == "smoke" else (0, 1, 2):
            yield variant | {"seed": seed}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return ("curve", "reward/solved", "step", 5), ("curve", "experts/busiest", "step", 5)
