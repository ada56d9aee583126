"""A small model of any attention methods, for tests."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from flax import nnx

from attention.methods.method import Method
from models.families import PRESETS
from models.model_config import ModelConfig
from models.transformer import Transformer

VOCABULARY = 32


def small_config(**changes) -> ModelConfig:
    """Four layers, or what ``changes`` says."""
    settings = dict(
        vocab_size=VOCABULARY,
        embed_dim=16,
        mlp_dim=24,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1e4,
        norm_eps=1e-5,
        tied_embeddings=True,
    )
    return ModelConfig(**settings | changes)


def small_model(methods: tuple[Method, ...], *, seed: int = 0, **changes) -> Transformer:
    """A ``small_config`` with norms of q and k, with random parameters that are the same for a
    seed.
    """
    config = small_config(**dict(qk_norm=True, attention=methods) | changes)
    # Not as one program, of which every model would have its own: an array of one shape is drawn by
    # the same program for all models.
    return Transformer(config, nnx.Rngs(seed))


def drawn(abstract):
    """Random parameters of numpy in place of shapes, those of a model or of its layers.

    For shapes that no other test has: nothing is compiled for them.
    """
    rng = np.random.default_rng(0)

    def draw(leaf) -> jax.Array:
        x = rng.standard_normal(leaf.shape) * (0.25 if len(leaf.shape) > 1 else 1.0)
        return jax.device_put(x.astype(leaf.dtype))

    return jax.tree.map(draw, abstract)


def narrow_preset(num_layers: int = 1, num_kv_heads: int = 2) -> ModelConfig:
    """The preset "tiny" with few narrow layers of two heads, for whole runs that take seconds."""
    return dataclasses.replace(
        PRESETS["tiny"],
        embed_dim=32,
        mlp_dim=32,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=num_kv_heads,
        head_dim=16,
    )


# What runs in processes of their own are given as config.model.preset.
NARROW = narrow_preset(num_layers=2)
SHALLOW = narrow_preset()
