"""Matrices of layers in the dtype of their products, made once for many passes.

A layer casts its matrices where it uses them: in the forward pass, and again where ``remat``
computes the layer again. An update of several micro-batches casts all of them before the first one
(``casts_of``) and gives every pass the same (``with_casts``). Gradients go to the matrices
themselves, as from their own casts.

Matrices of experts are cast in their layers: with parts of experts on each device their gradients
are added over the devices in their own dtype.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from models.lora import STACKS
from models.quantised import MATRICES, cast_name

# By stack and matrix.
Casts = dict[str, dict[str, nnx.Variable]]


def casts_of(model: Any) -> Casts:
    """The matrices of a model's layers that are in another dtype than their products, cast.

    Empty for a model without such layers.
    """
    found: Casts = {}
    for stack in STACKS:
        layers = getattr(model, stack, None)
        if layers is None or model.config.quantised is not None:
            continue
        own = {name: getattr(layers, name, None) for name in MATRICES if name[:7] != "expert_"}
        found[stack] = {
            name: matrix.replace(matrix[...].astype(model.config.dtype))
            for name, matrix in own.items()
            if matrix is not None and matrix.dtype != model.config.dtype
        }
    return found


def with_casts(model: Any, casts: Casts) -> Any:
    """A copy of a model whose layers take these casts; the model itself without any."""
    if not any(casts.values()):
        return model
    copy = jax.tree.map(lambda x: x, model)
    for stack, own in casts.items():
        for name, cast in own.items():
            setattr(getattr(copy, stack), cast_name(name), cast)
    return copy
