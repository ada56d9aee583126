"""A model of dense attention that goes on with NSA, MoBA, squid or DSA, by continued training.

What: the first stage trains a small model of dense attention (or of latent attention, "latent") on
  look-ups in files (configs/long_context.py). Each of the others takes it over with another method
  and trains on, with the loss on tasks of the held-out suite before and after. Keys and values of
  NSA's new branches begin as copies of the layer's own. MoBA and squid have no parameters: what
  changes is which keys a query sees. An indexer of DSA begins at random, so it learns first, with
  attention to all keys ("dsa_indexer"), as DeepSeek-V3.2 does, and then on the keys that it chooses
  ("dsa"). It needs latent attention, which keys of dense attention cannot become.
Command: for stage in dense nsa moba squid latent dsa_indexer dsa; do python -m launch.sft
  --config=configs/convert_attention.py:$stage --workdir=runs/convert/$stage; done
  To convert a model of your own: --config.model.weights=<its folder> --config.model.preset=None,
  --config.model.attention of one method for all layers (for dsa with the sizes of its latent
  attention), and the tasks of its work in config.sft.tasks and config.suites.
Hardware: 2 CPU cores. Run time: not run; about that of the stages of configs/long_context_base.py.
Expected metric: sft/held_out_loss of the last row of sft/metrics.jsonl is near that of "dense" (of
  "latent" for dsa) and below that of the first row. Not run.
"""

import ml_collections

from configs import long_context
from configs.long_context import DOCUMENTS, LOCAL, METHODS, PAGE, PAGES, lookup
from configs.long_context_base import CONVERTED, SHORT

FOLDER = "runs/convert"
INDEXER = dict(name="dsa", picks=256, index_heads=16, index_size=64)
LATENT = dict(name="mla")
# Each stage: the method of every third layer, and the stage that it goes on from.
STAGES = {
    "dense": (METHODS["dense"], ""),
    "nsa": (METHODS["nsa"], "dense"),
    "moba": (METHODS["moba"], "dense"),
    "squid": (METHODS["squid"], "dense"),
    "latent": (LATENT, ""),
    "dsa_indexer": (INDEXER, "latent"),
    "dsa": (INDEXER, "dsa_indexer"),
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" for "dense", a name of STAGES, perhaps with "_smoke" (seconds, from scratch or from
    config.model.weights); "smoke" for that of "dense".
    """
    smoke = arg.endswith("smoke")
    stage = arg.removesuffix("smoke").removesuffix("_") or "dense"
    if stage not in STAGES:
        known = ", ".join(STAGES)
        raise ValueError(
            f"configs/convert_attention.py:{arg}: expected nothing, smoke or one of {known}, "
            "perhaps with _smoke"
        )
    method, before = STAGES[stage]
    config = long_context.get_config("smoke" if smoke else "")
    config.model.update(
        weights="" if smoke or not before else f"{FOLDER}/{before}/sft",
        attention=(LOCAL, LOCAL, method),
        change_methods=stage in ("nsa", "dsa_indexer"),
        # beside the loss of tokens; an indexer alone would need no more
        index_loss=1.0 if method is INDEXER else 0.0,
        index_all_keys=stage == "dsa_indexer",
    )
    with config.ignore_type():
        config.documents = DOCUMENTS if stage == "squid" else None
    config.rollout.engine.page = PAGES.get(stage, PAGE)
    first, steps, total, rate = (CONVERTED, 300, 300, 4e-3) if before else (SHORT, 780, 1300, 2e-2)
    small = dict(tokens=160, files=3)
    config.sft = dict(
        steps=2 if smoke else steps,
        rows=2,
        slots=512 if smoke else 4096,
        least_slots=None if smoke else 64,
        demonstrations=8 if smoke else 100_000,
        held_out=4 if smoke else 48,
        checkpoint_every=100,
        tasks=lookup(split="train", seed=3, **small if smoke else dict(first=first)),
        demonstration=dict(p_right=1.0),
        optimizer=dict(
            learning_rate=rate / 10,
            muon_learning_rate=rate,
            schedule="cosine",
            warmup_steps=0 if smoke else 20,
            total_steps=None if smoke else total,
            b2=0.98,
            weight_decay=0.01,
        ),
    )
    return config
