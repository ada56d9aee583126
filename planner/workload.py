"""The job that is planned, and the costs of one step of it on a device.

At the end stand the sizes of a model's experts, which several parts of the arithmetic need.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from models.model_config import ModelConfig
from models.sharding import MeshConfig
from planner.collectives import Kind
from planner.targets import Target

# Bytes of float32, in which moments are kept and gradients added.
FLOAT32 = 4


class Documents(NamedTuple):
    """Documents at the beginning of every row, each encoded alone (``attention.methods.squid``)."""

    count: int
    # Of each.
    tokens: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """The job that is planned."""

    # The model's name and its shape.
    name: str
    model: ModelConfig
    target: Target
    # Tokens that one step trains on, in rows of ``context`` tokens.
    tokens: int
    context: int
    # Rows that decode together on each shard of rows, each half full on average.
    rows: int
    # Whether the learner's moments wait in the host's memory.
    offload_moments: bool = False
    # Tokens of a row that are predicted; None for half of them.
    targets: int | None = None
    # Tokens of a row, of those of ``context``, that are prompts of an update in two phases
    # (``train.pack.prompt_slots``); 0 for one phase.
    prompts: int = 0
    # Documents of a row; None for rows without.
    documents: Documents | None = None

    @property
    def predicted(self) -> int:
        """Tokens of a row that are predicted."""
        return self.context // 2 if self.targets is None else self.targets


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Costs of one step of a role on one device of a mesh."""

    role: str
    mesh: MeshConfig
    # Bytes by part.
    memory: dict[str, float]
    # Operations that the device does; those of them that are not done again; and those of them
    # that are attention's, which kernels do not tell.
    flops: float
    useful: float
    attention: float
    # Bytes read from and written to HBM.
    hbm: float
    # Bytes that it sends, by kind of collective.
    sent: dict[Kind, float]
    # Tokens trained on or sampled by all devices.
    tokens: float
    # Bytes of the host's memory that arrays of the device wait in, by part.
    host: dict[str, float] = dataclasses.field(default_factory=dict)
    # Which numbers come from the compiled program, in words.
    source: str = "arithmetic"

    @property
    def total_bytes(self) -> float:
        """Memory of all parts."""
        return sum(self.memory.values())

    def seconds(self, target: Target) -> dict[str, float]:
        """The least time for each resource alone, at its peak rate."""
        sent = {
            leaves: sum(x for kind, x in self.sent.items() if kind.leaves_domain == leaves)
            for leaves in (False, True)
        }
        return {
            "compute": self.flops / target.flops,
            "HBM": self.hbm / target.bandwidth,
            "links": sent[False] / target.link,
            "network": sent[True] / target.network,
        }

    def bound(self, target: Target) -> float:
        """The least time of the step: that of the slowest resource, if all overlap."""
        return max(self.seconds(target).values())

    def mfu(self, target: Target) -> float:
        """The highest model FLOPs utilisation that this bound allows."""
        return self.useful / (self.bound(target) * target.flops)

    def tokens_per_second(self, target: Target) -> float:
        """Tokens per second of one device, at the bound."""
        return self.tokens / self.bound(target) / self.mesh.devices


def passes(model: ModelConfig) -> int:
    """Times that layers run over the tokens in an update: forward, backward, and forward once more
    with ``remat``. In each a layer reads its weights, sums its results and exchanges its tokens.
    """
    return 2 + model.remat


def folded(model: ModelConfig) -> bool:
    """True if whole experts are cut over ``expert`` and ``tensor`` together."""
    return model.moe is not None and model.moe.fold


def expert_devices(model: ModelConfig, mesh: MeshConfig) -> int:
    """Over how many devices whole experts are cut."""
    if model.moe is None:
        return 1
    return (mesh.expert or 1) * (mesh.tensor if folded(model) else 1)


def copies_sent(model: ModelConfig, mesh: MeshConfig) -> float:
    """Copies of each of its tokens that a device sends to experts; 0 where experts are not cut over
    devices.
    """
    if model.moe is None or expert_devices(model, mesh) == 1:
        return 0.0
    return model.moe.active / (mesh.tensor if folded(model) else 1)


def expert_elements(model: ModelConfig) -> tuple[int, int]:
    """Elements of all experts that are routed to, with their padding, and of a token's experts."""
    if model.moe is None:
        return 0, 0
    moe = model.moe
    # gate, up and down
    of_one = 3 * model.embed_dim * moe.mlp_dim * expert_layers(model)
    return of_one * (moe.slots or moe.experts), of_one * moe.active


def expert_layers(model: ModelConfig) -> int:
    """Layers that have experts."""
    return 0 if model.moe is None else model.num_layers - model.moe.first_dense
