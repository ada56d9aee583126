"""Low-rank adapters of a model's matrices (LoRA, 2106.09685).

A matrix W of a layer computes y W + s (y A) B with A [in, rank] and B [rank, out]. W, like every
other parameter of the model, is frozen: an update changes A and B alone. A begins as PEFT begins
it, and B at zero, so a model with new adapters computes exactly what it computes without them.

The product is never merged into W, in training and in sampling alike. In bfloat16 W + s A B would
round most of a small change away, and the sampler would be another policy than the trainer; and
several adapters can share one W.

Dimensions: L layers of a stack, D inputs and F outputs of a matrix, which may be several axes, R
rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from attention.products import project
from models.quantised import product
from models.side_by_side import JOINED, products
from pallas_kernels.saved import PRODUCT

# PEFT's names of the matrices that can have an adapter, and the layers' own.
TARGETS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
# The stacks of layers that a model may have.
STACKS = ("first_layers", "layers")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Choice of the matrices that have adapters, and their size. Names and meanings are PEFT's."""

    # R, the inner size of each adapter.
    rank: int = 16
    # PEFT's lora_alpha: what an adapter adds is multiplied by alpha / rank.
    alpha: float = 32.0
    # PEFT's target_modules: the matrices of every layer that have an adapter. For a model with
    # experts those of attention alone.
    targets: tuple[str, ...] = tuple(TARGETS)
    # Whether the factor is alpha / sqrt(rank) instead (2312.03732, PEFT's use_rslora).
    rslora: bool = False

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha} must be positive")
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            wrong = ", ".join(unknown) or "none"
            raise ValueError(f"targets has {wrong}; it may have {', '.join(TARGETS)}")
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets={self.targets} names a matrix twice")

    @property
    def scale(self) -> float:
        """s, by which the product of an adapter is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def check_experts(self) -> None:
        """Raises ValueError for targets that a model with experts cannot have."""
        refused = [name for name in self.targets if name not in ATTENTION_TARGETS]
        if refused:
            raise ValueError(
                f"targets has {', '.join(refused)}, which in this model are matrices of "
                f"experts; adapters of experts are not supported, only {ATTENTION_TARGETS}"
            )


class Adapters(nnx.Module):
    """The adapters of a stack of layers, as parameters stacked on axis 0 like those of ``Layers``:
    "q_a" [L, D, R] and "q_b" [L, R, F] for the matrix "q".
    """

    def __init__(self, lora: LoRA, layers: nnx.Module, rngs: nnx.Rngs):
        self.scale = lora.scale
        self.rank = lora.rank
        for target in lora.targets:
            name = TARGETS[target]
            matrix = getattr(layers, name)
            axes = matrix.get_metadata("logical_axes")
            # behind the axis of layers; only o contracts two axes, heads and their size
            inner = 3 if name == "o" else 2
            shape = (*matrix.shape[:inner], lora.rank)
            # torch's kaiming_uniform_(a=sqrt(5)), which PEFT takes for A
            bound = math.prod(matrix.shape[1:inner]) ** -0.5
            a = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
            b = jnp.zeros((matrix.shape[0], lora.rank, *matrix.shape[inner:]), matrix.dtype)
            a_axes = (*axes[:inner], "rank")
            b_axes = ("layers", "rank", *axes[inner:])
            for part, x, names in (("a", a.astype(matrix.dtype), a_axes), ("b", b, b_axes)):
                setattr(self, f"{name}_{part}", nnx.Param(x, logical_axes=names, stacks=1))

    def added(self, name: str, y: jax.Array, contract: int) -> jax.Array | None:
        """The term that the adapter of a layer's matrix adds to its product with y; None without
        one.

        The module is that of one layer: its parameters have lost the axis of layers. name: of the
        matrix, such as "q". contract: how many last axes of y the matrix contracts.
        """
        if not hasattr(self, f"{name}_a"):
            return None
        a = getattr(self, f"{name}_a")[...].astype(y.dtype)
        b = getattr(self, f"{name}_b")[...].astype(y.dtype)
        return project(project(y, a, contract), b) * self.scale


class Adds(Protocol):
    """Anything that adds to products of a layer's matrices: ``Adapters``, or ``AdapterRows``."""

    def added(self, name: str, y: jax.Array, contract: int) -> jax.Array | None:
        """As ``Adapters.added``."""


class Adapted(Protocol):
    """A layer that may have adapters."""

    lora: Adds | None


def projected(
    layer: Adapted, name: str, y: Float[Array, "B T *D"], contract: int = 1
) -> Float[Array, "B T *F"]:
    """The product of y with a layer's matrix, and what its adapter adds, in y's dtype.

    name: of the matrix, such as "q". contract: how many last axes of y it contracts.
    """
    out = product(layer, name, y, contract)
    added = None if layer.lora is None else layer.lora.added(name, y, contract)
    return checkpoint_name(out if added is None else out + added, PRODUCT)


def projected_together(
    layer: Adapted, name: str, y: Float[Array, "B T D"], shapes: Sequence[tuple[int, ...]]
) -> list[Float[Array, "B T *F"]]:
    """``projected`` for each matrix of ``JOINED[name]``; arguments as for ``products``."""
    if not hasattr(layer, name):
        return [projected(layer, part, y) for part in JOINED[name]]
    found = products(layer, name, y, shapes)
    if layer.lora is None:
        return found
    added = [layer.lora.added(part, y, 1) for part in JOINED[name]]
    return [x if more is None else x + more for x, more in zip(found, added, strict=True)]


def new_adapters(model: nnx.Module, lora: LoRA, rngs: nnx.Rngs) -> dict[str, Adapters]:
    """Adapters that compute nothing yet, by their stack, for a model which may be abstract."""
    stacks = {name: getattr(model, name, None) for name in STACKS}
    return {
        name: Adapters(lora, layers, rngs) for name, layers in stacks.items() if layers is not None
    }


def trained(model: Any) -> Any:
    """The part of a model that an update changes, a pytree: the adapters by their stack; the model
    itself if it has none.
    """
    found = {}
    for name in STACKS:
        adapters = getattr(getattr(model, name, None), "lora", None)
        if adapters is not None:
            found[name] = adapters
    return found or model


def with_trained(model: Any, part: Any) -> Any:
    """The model with ``part`` in place of what ``trained`` gives of it."""
    if trained(model) is model:
        return part
    copy = jax.tree.map(lambda x: x, model)
    for name, adapters in part.items():
        getattr(copy, name).lora = adapters
    return copy
