"""Samplers in float32, bfloat16, int8 and fp8 of the quickstart: how far each is from its trainer,
and what it earns.

What: four runs of one seed with the same warm start. What samples is in float32, in bfloat16, or in
  bfloat16 with the matrices of its layers in int8 or fp8; the trainer is in float32. Each step is
  trained on before the next one is sampled, so all mismatch comes from the form of the weights.
Command: python -m launch.sweep --config=configs/quantised.py --workdir=runs/quantised
Hardware: 2 CPU cores. Run time: see docs/results/quantised.md.
Expected metric: policy/mismatch_k3 grows from form to form, and reward/total does not fall.
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/quantised.py:{arg}: the argument must be empty or smoke")
    config = quickstart.get_config(arg)
    config.suites = ()
    if arg == "":
        config.sft.update(steps=200)
        config.train.update(steps=16, tasks_per_step=8, micro_batches=4)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run."""
    for dtype in ("float32", "bfloat16"):
        yield {"variant": dtype, "seed": 0, "rollout.dtype": dtype}
    for weights in ("int8", "fp8"):
        yield {
            "variant": weights,
            "seed": 0,
            "rollout.dtype": "bfloat16",
            "rollout.weights": weights,
        }


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (
        ("curve", "policy/mismatch_k3", "step", 1),
        ("curve", "policy/mismatch_max", "step", 1),
        ("curve", "reward/total", "step", 4),
        ("bars", "weights/publish_live_bytes"),
    )
