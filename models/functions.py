"""Computations of layers without parameters of their own: normalisation, SwiGLU, rotary
position embedding.

Dimensions: B rows, T tokens, D model, F feed-forward, N heads, H head size.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.model_config import ModelConfig
from models.rope_scaling import DynamicScaling, LinearScaling, Yarn

# Logits of tokens that do not exist. Finite, so that 0 times it is 0 and not NaN.
NEVER = -1e30

# The backward pass of the following two keeps only their arguments and computes the rest again:
# that costs less time than to write the rest to memory and read it back.


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "... D"]:
    """Root-mean-square normalisation over the last axis (1910.07467), computed in float32.

    Returns it in x's dtype.
    """
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


def norm(x: Float[Array, "... D"], scale: Float[Array, " D"], config: ModelConfig) -> jax.Array:
    """``rms_norm`` with the settings of a model."""
    if config.norm_offset:
        scale = scale.astype(jnp.float32) + 1
    return rms_norm(x, scale, config.norm_eps)


@functools.partial(jax.checkpoint, prevent_cse=False)
def swiglu(gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Float[Array, "... F"]:
    """silu(gate) * up (2002.05202)."""
    return jax.nn.silu(gate) * up


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def clipped_swiglu(
    gate: Float[Array, "... F"], up: Float[Array, "... F"], limit: float
) -> Float[Array, "... F"]:
    """g sigmoid(1.702 g) (u + 1) of gpt-oss (2508.10925, section 2), where g is the gate, at most
    ``limit``, and u is ``up`` between -limit and limit.
    """
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def rope_frequencies(config: ModelConfig) -> Float[Array, " H/2"]:
    """Radians per position of each rotated pair, with the scaling that is configured."""
    size = config.rotated
    exponents = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None or isinstance(scaling, DynamicScaling):
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Yarn):
        return scaling.stretched(frequencies, config.rope_theta)
    turns = scaling.original_max_positions * frequencies / (2 * jnp.pi)
    # 0 for frequencies that are divided by the factor, 1 for those that stay
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return frequencies * (smooth + (1.0 - smooth) / scaling.factor)


def rope(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], config: ModelConfig
) -> Float[Array, "B T N H"]:
    """Rotary position embedding (2104.09864) in the half-split layout of Hugging Face
    checkpoints. With ``rotated`` below the size of a head, its further elements stay as they are.
    """
    if config.rotated < x.shape[-1]:
        x, rest = x[..., : config.rotated], x[..., config.rotated :]
        whole = dataclasses.replace(config, head_dim=config.rotated, partial_rotary=1.0)
        return jnp.concatenate([rope(x, positions, whole), rest], axis=-1)
    # half-split: pair i of a head is its elements i and i + H / 2
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    if isinstance(config.rope_scaling, Yarn) and config.rope_scaling.rotated_factor != 1:
        cos, sin = (x * config.rope_scaling.rotated_factor for x in (cos, sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def hide_padding(config: ModelConfig, logits: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """Logits of which no token that does not exist is ever drawn, and none takes probability."""
    if config.unpadded is None or config.unpadded.vocab_size == config.vocab_size:
        return logits
    return jnp.where(jnp.arange(config.vocab_size) < config.unpadded.vocab_size, logits, NEVER)
