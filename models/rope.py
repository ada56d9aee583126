"""Rotary position embedding (2104.09864) with Llama 3.1's scaling.

Dimensions: B rows, T tokens, N heads, H head size.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from models.transformer import ModelConfig


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of low frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


def rope_frequencies(config: ModelConfig) -> Float[Array, " H/2"]:
    """Radians per position of each rotated pair, with Llama 3.1's scaling where configured."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * jnp.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return frequencies * (smooth + (1.0 - smooth) / scaling.factor)


def rope(x: Float[Array, "B T N H"], positions: Int[Array, "B T"], config: ModelConfig) -> Float[Array, "B T N H"]:
    """Rotary position embedding (2104.09864) in the half-split layout of Hugging Face checkpoints."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
