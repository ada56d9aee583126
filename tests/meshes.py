"""Every mesh of eight devices, the models that are tried on them, and which of them on which."""

from __future__ import annotations

import collections
import dataclasses
import itertools

from attention.methods.dense import Dense
from attention.methods.dsa import DSA
from attention.methods.gated_delta import GatedDelta
from attention.methods.gated_documents import GatedDocuments
from attention.methods.mla import MLA
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.sinks import Sinks
from attention.methods.window import Window
from models.model_config import MoE
from models.sharding import MESH_AXES, MeshConfig

DEVICES = 8


def _name(config: MeshConfig) -> str:
    sizes = zip(MESH_AXES, config.sizes, strict=True)
    return " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1)


_FACTORS = itertools.product((1, 2, 4, 8), repeat=len(MESH_AXES))
_ALL = [MeshConfig(**dict(zip(MESH_AXES, sizes, strict=True))) for sizes in _FACTORS]
# All 35: one axis of 8, two of 4 and 2, three of 2.
MESHES = {_name(config): config for config in _ALL if config.devices == DEVICES}

CHOSEN = DSA(8, 8, 6, 2, picks=6, index_heads=4, index_size=8, index_loss=0.5)
METHODS = {
    "dense": (Dense(),),
    "window": (Window(7),),
    "nsa": (NSA(length=4, stride=2, block=8, picks=3, initial=1, local=1, window=10),),
    "moba": (MoBA(block=8, picks=2),),
    "states": (GatedDelta(), Dense()),
    "latent": (MLA(latent=8, query_latent=8, plain_size=6, value_size=2),),
    "sinks": (Sinks(7), Sinks()),
    "chosen": (CHOSEN, dataclasses.replace(CHOSEN, shared=True, index_loss=0.0)),
    # on contexts with documents, in one softmax and in two
    "documents": (Dense(), GatedDocuments()),
}

# What follows attention: a dense part, or experts, of which a device has parts or whole ones.
FEED_FORWARD = {
    "plain": None,
    "experts": MoE(experts=8, active=2, mlp_dim=8, shared=1, biases=True),
    "folded": MoE(experts=8, active=2, mlp_dim=8, shared=1, biases=True, fold=True),
}


def differs(mesh: str, feed_forward: str) -> bool:
    """Whether a model has other programs on a mesh than with another feed-forward part."""
    return feed_forward != "folded" or MESHES[mesh].tensor > 1


def model_options(mesh: str, methods: str, feed_forward: str) -> dict:
    """What a small model has that can be cut over a mesh."""
    attention = METHODS[methods]
    heads = 8 if MESHES[mesh].tensor == DEVICES else 4
    return dict(
        attention=attention,
        num_layers=len(attention),
        num_heads=8,
        num_kv_heads=heads,
        head_dim=4,
        moe=FEED_FORWARD[feed_forward],
    )


def _shown(mesh: str, methods: str, feed_forward: str) -> set:
    """What a case shows: the mesh, the model, and each two axes with each half of the model."""
    sizes = zip(MESH_AXES, MESHES[mesh].sizes, strict=True)
    axes = [axis for axis, size in sizes if size > 1]
    pairs = itertools.product(itertools.combinations(axes, 2), (methods, feed_forward))
    return {mesh, (methods, feed_forward), *pairs}


def _covering() -> list[tuple[str, str, str]]:
    """Cases (mesh, methods, feed_forward) which together show all that every case would.

    Greedy: the case that shows most of what is left, and of equal ones that with the rarest model.
    """
    every = itertools.product(MESHES, METHODS, FEED_FORWARD)
    shown = {case: _shown(*case) for case in every if differs(case[0], case[2])}
    left = set().union(*shown.values())
    used: collections.Counter = collections.Counter()
    cases = []
    while left:
        best = max(shown, key=lambda case: (len(shown[case] & left), -used[case[1:]]))
        used[best[1:]] += 1
        left -= shown[best]
        cases.append(best)
    return cases


# About 50 of the 765 that there are: every mesh occurs, every attention method with every
# feed-forward part, and every two axes with every attention method and every feed-forward part.
CASES = _covering()
