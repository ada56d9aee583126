"""Models that look things up, for configs/long_context.py to start from.

What: three warm starts, one after another. The first one, from random parameters and with dense
  attention, has prompts of 50 to 2,000 tokens: drills teach to look up, whole tasks to write the
  answer. The others are made for each method. In the second one, drills grow from 950 to 4,100
  tokens; it forgets how to write answers, which the third one teaches again: whole tasks with
  drills among them, at a lower rate.
Command: python -m launch.sft --config=configs/long_context_base.py --workdir=runs/long_base/short
  for method in dense window moba nsa squid; do for stage in ${method}_drills $method; do
  python -m launch.sft --config=configs/long_context_base.py:$stage
  --workdir=runs/long_base/$stage; done; done
Hardware: 2 CPU cores. Run time: see docs/results/long_context.md.
Expected metric: a loss near 0.1 on whole tasks at the end of sft/metrics.jsonl. How well a model
  looks things up at full length differs from one processor to another
"""

from collections.abc import Iterable

import ml_collections

from configs import long_context
from configs.long_context import BASES, METHODS, lookup


def stages(
    curriculum: Iterable[tuple[int, int, int, int]], *, drill: bool = False
) -> tuple[dict, ...]:
    """Stages of a curriculum: (tasks, tokens of the modules, constants to look up, tokens for each
    constant).
    """
    names = ("tasks", "tokens", "matter", "spacing")
    return tuple(dict(zip(names, stage, strict=True), drill=drill) for stage in curriculum)


SHORT = (
    # the tokenizer is trained on these
    *stages([(400, 130, 2, 15)]),
    *stages([(35840, 20, 4, 5), (480, 270, 20, 12), (160, 830, 16, 50)], drill=True),
    *stages([(19200, 25, 2, 5), (800, 120, 2, 20), (480, 400, 2, 40)]),
    *stages([(200, 1200, 2, 50), (60, 2000, 2, 50)]),
)
# Lengths about double at most: a method that chooses among blocks then finds some of the constants
# by what it has learned, and learns from these. With a drill's questions the prompts just fit into
# rows of 1,024, 2,048 and 4,096 tokens. The rest of its updates, about 120, are on tasks of
# training.
LONG = (
    *stages([(320, 750, 14, 50)], drill=True),
    *stages([(80, 780, 2, 50)]),
    *stages([(240, 1600, 32, 50)], drill=True),
    *stages([(60, 1800, 2, 50)]),
    *stages([(100, 2600, 52, 50), (200, 3600, 70, 50)], drill=True),
)


# Whole tasks have one look-up for forty tokens. Drills among them keep what the second model has
# learned.
MIXED = stages([(24, 3600, 70, 50)], drill=True) + stages([(44, 3600, 2, 50)])
TASKS = (*stages([(320, 320, 2, 40)]), *MIXED * 4)
# From the last model of dense attention to another method.
CONVERTED = (*stages([(320, 320, 2, 40)]), *MIXED * 8)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" for the first model; a name of long_context.METHODS and "_drills" for the second one
    of a method, the name alone for the last one; the name and "_converted" for one that goes on
    from the last one of dense attention; "smoke" (seconds).
    """
    method, _, stage = arg.partition("_")
    staged = (f"{name}_{stage}" for name in METHODS for stage in ("drills", "converted"))
    if arg not in ("", "smoke", *METHODS, *staged):
        known = ", ".join(METHODS)
        raise ValueError(
            f"configs/long_context_base.py:{arg}: expected nothing, smoke or one of {known}, with "
            "_drills, with _converted or alone"
        )
    config = long_context.get_config(method)
    if arg == "smoke":
        return config
    if not arg:
        first, steps, total, rate, weights = SHORT, 780, 1300, 2e-2, ""
    elif stage == "drills":
        first, steps, total, rate, weights = LONG, 400, 520, 1e-2, f"{BASES}/short/sft"
    elif stage == "converted":
        first, steps, total, rate, weights = CONVERTED, 300, 300, 4e-3, f"{BASES}/dense/sft"
    else:
        first, steps, total, rate, weights = TASKS, 156, 160, 4e-3, f"{BASES}/{method}_drills/sft"
    config.model.weights = weights
    # NSA has parameters that the first model lacks
    config.model.change_methods = arg in ("nsa_drills", "nsa_converted")
    config.sft = dict(
        steps=steps,
        rows=2,
        slots=4096,
        least_slots=64,
        demonstrations=100_000,
        checkpoint_every=100,
        tasks=lookup(split="train", seed=4 if arg in METHODS else 3 if arg else 1, first=first),
        demonstration=dict(p_right=1.0),
        optimizer=dict(
            learning_rate=rate / 10,
            muon_learning_rate=rate,
            schedule="cosine",
            warmup_steps=5 if arg else 50,
            total_steps=total,
            b2=0.98,
            weight_decay=0.01,
        ),
    )
    return config
