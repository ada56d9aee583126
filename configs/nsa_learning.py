"""The reason why NSA gained nothing from RL where dense attention did: rate, picks or warm start.

What: configs/long_context.py with NSA, in which one thing is changed at a time: a third and a tenth
  of its learning rate; the sampler's picks of blocks replayed in the trainer; a warm start that
  goes on from the finished model of dense attention, instead of growing up with NSA. Dense
  attention stands beside them. With the argument "short" it is the quickstart's agent, from
  scratch, whose contexts of at most 288 tokens are 18 blocks of which a query attends to 4.
Command: the warm starts of configs/long_context_base.py for dense and nsa, and then
  python -m launch.sft --config=configs/long_context_base.py:nsa_converted
  --workdir=runs/long_base/nsa_converted, then
  python -m launch.sweep --config=configs/nsa_learning.py --workdir=runs/nsa_learning
  --figure=docs/nsa_learning.png; and without warm starts
  python -m launch.sweep --config=configs/nsa_learning.py:short --workdir=runs/nsa_short
  --figure=docs/nsa_short.png
Hardware: 2 CPU cores. Run time: 28 minutes a run of "short" beside other programs; at full length
  not run, 12 to 16 minutes a run of configs/long_context.py.
Expected metric: held-out pass@1 38.9 -> 58.3 % with NSA and 49.5 -> 68.4 with dense attention with
  "short", one seed. At full length one of the arms rises as dense attention does; not run.
"""

from collections.abc import Iterator

import ml_collections

from configs import long_context, quickstart
from configs.long_context import BASES, LOCAL, METHODS, base_of

RATE = 1e-3
NSA = {"model.attention": (LOCAL, LOCAL, METHODS["nsa"]), "model.weights": base_of("nsa")}
ARMS = {
    "dense": {
        "model.attention": (LOCAL, LOCAL, METHODS["dense"]),
        "model.weights": base_of("dense"),
    },
    "nsa": NSA,
    "a third of the rate": NSA | {"train.optimizer.learning_rate": RATE / 3},
    "a tenth of the rate": NSA | {"train.optimizer.learning_rate": RATE / 10},
    "picks replayed": NSA | {"rollout.picks": "replay"},
    "converted": NSA | {"model.weights": f"{BASES}/nsa_converted/sft"},
}
# For contexts of 288 tokens, and the same arms without models to start from.
SHORT = dict(name="nsa", length=8, stride=4, block=16, picks=4, initial=1, local=2, window=32)
_SHORT_RATE = 4e-4
SHORT_ARMS = {
    "dense": {},
    "nsa": {"model.attention": (SHORT,)},
    "picks replayed": {"model.attention": (SHORT,), "rollout.picks": "replay"},
    "a third of the rate": {
        "model.attention": (SHORT,),
        "train.optimizer.learning_rate": _SHORT_RATE / 3,
    },
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The arm "dense". arg: "", "short" or "smoke" (seconds, from scratch)."""
    if arg not in ("", "short", "smoke"):
        raise ValueError(f"configs/nsa_learning.py:{arg}: expected nothing, short or smoke")
    if arg == "short":
        config = quickstart.get_config()
        config.suites = config.suites[:1]
        config.train.steps = 48
        config.train.optimizer.learning_rate = _SHORT_RATE
        return config
    config = long_context.get_config(arg)
    config.train.optimizer.learning_rate = RATE
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all arms of a seed before the next seed."""
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        if arg == "short":
            for variant, keys in SHORT_ARMS.items():
                yield {"variant": variant, "seed": seed} | keys
            continue
        for variant, keys in ARMS.items():
            overrides = {"variant": variant, "seed": seed, "mesh.data": 1} | keys
            if arg == "smoke":
                overrides["model.weights"] = ""
            yield overrides


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    window = 1 if arg == "smoke" else 5
    metrics = ("reward/solved", "policy/mismatch_k3", "train/grad_norm")
    return tuple(("curve", metric, "step", window) for metric in metrics)
