"""GRPO against Dr.GRPO and RLOO on the embedded tasks, from the same warm start, 3 seeds each.

What: the quickstart with only the advantage and its loss's averaging changed; one table and one
figure. Command: python -m launch.sweep --config=configs/ablation.py --workdir=runs/ablation
Hardware: 2 CPU cores. Run time: nine quickstarts one after another, of which six take over a warm
start. Expected metric: held-out pass@1 before and after, mean and range over seeds; no order is
expected.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    config = quickstart.get_config(arg)
    # what "constant" divides by: about what a trajectory samples, so that all three learn alike
    config.train.loss.constant_length = 64
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run."""
    variants = (
        {"train.advantage": "grpo", "train.loss.aggregation": "sequence"},
        {"train.advantage": "dr_grpo", "train.loss.aggregation": "constant"},
        {"train.advantage": "rloo", "train.loss.aggregation": "constant"},
    )
    for variant in variants:
        for seed in (0,) if arg == "smoke" else (0, 1, 2):
            yield variant | {"seed": seed}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return ("curve", "reward/solved", "step", 5), ("curve", "policy/entropy", "step", 5)
