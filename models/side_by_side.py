"""Matrices of a layer that read the same input as one matrix, for models that sample.

One product in place of two or three reads its input once, and is one kernel. Every output is a
product of its own column, so it means the same.

Dimensions: B rows, T tokens, D inputs and F outputs of all the matrices together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.quantised import product, scale_name

# Names of the joined matrices, and of those that they are made of.
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def lay_side_by_side(layer: nnx.Module) -> nnx.Module:
    """A copy of one layer in which ``JOINED`` matrices [D, F], with their scales [F] if they are
    quantised, stand in place of their parts. Parts that a layer does not have are not joined.

    layer: of parameters without the axis of layers.
    """
    layer = jax.tree.map(lambda x: x, layer)
    for name, parts in JOINED.items():
        if not all(hasattr(layer, part) for part in parts):
            continue
        scales = [scale_name(part) for part in parts]
        _join(layer, name, parts, inputs=1)
        if hasattr(layer, scales[0]):
            _join(layer, scale_name(name), scales, inputs=0)
    return layer


def _join(layer: nnx.Module, name: str, parts: Sequence[str], inputs: int) -> None:
    """Puts parameters with so many axes of inputs in front side by side, and takes them away."""
    found = [getattr(layer, part) for part in parts]
    flat = [x[...].reshape(*x.shape[:inputs], -1) for x in found]
    axes = found[0].get_metadata("logical_axes")[: 1 + inputs]
    whole = nnx.Param(jnp.concatenate(flat, axis=-1), logical_axes=(*axes, None))
    for part in parts:
        delattr(layer, part)
    setattr(layer, name, whole)


def products(
    layer: nnx.Module, name: str, y: Float[Array, "B T D"], shapes: Sequence[tuple[int, ...]]
) -> list[Float[Array, "B T *F"]]:
    """The products of y with each matrix of ``JOINED[name]``, whether they are joined or not.

    shapes: of the outputs of each.
    """
    if not hasattr(layer, name):
        return [product(layer, part, y) for part in JOINED[name]]
    whole = product(layer, name, y)
    ends = [*itertools.accumulate(math.prod(shape) for shape in shapes)]
    found = jnp.split(whole, ends[:-1], axis=-1)
    return [x.reshape(*y.shape[:2], *shape) for x, shape in zip(found, shapes, strict=True)]
