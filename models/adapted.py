"""Models with adapters, without them, and with adapters merged into their matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attention.products import project
from models.layers import Layers
from models.lora import TARGETS, Adapters, LoRA, trained
from models.transformer import Transformer


def with_adapters(model: Transformer, lora: LoRA, adapters: Mapping[str, Adapters]) -> Transformer:
    """A copy of a model with adapters by their stack; its other parameters are the model's own."""
    copy = jax.tree.map(lambda x: x, model)
    copy.config = dataclasses.replace(model.config, lora=lora)
    for name, part in adapters.items():
        getattr(copy, name).lora = part
    return copy


def without_adapters(model: Transformer) -> Transformer:
    """A copy of a model without its adapters; its other parameters are the model's own."""
    copy = jax.tree.map(lambda x: x, model)
    if model.config.lora is not None:
        copy.config = dataclasses.replace(model.config, lora=None)
        for name in trained(model):
            del getattr(copy, name).lora
    return copy


def merged(model: Transformer) -> Transformer:
    """A model without adapters whose matrices are W + s A B, made in float32 and rounded once to
    the dtype of W. A model without adapters comes back as it is.
    """
    lora = model.config.lora
    if lora is None:
        return model

    def merge(layers: Layers, adapters: Adapters) -> None:
        for target in lora.targets:
            name = TARGETS[target]
            w = getattr(layers, name)
            a, b = (getattr(adapters, f"{name}_{part}")[...].astype(jnp.float32) for part in "ab")
            whole = w[...].astype(jnp.float32) + adapters.scale * jax.vmap(project)(a, b)
            setattr(layers, name, w.replace(whole.astype(w.dtype)))
        del layers.lora

    copy = jax.tree.map(lambda x: x, model)
    copy.config = dataclasses.replace(model.config, lora=None)
    for name, adapters in trained(copy).items():
        merge(getattr(copy, name), adapters)
    return copy
