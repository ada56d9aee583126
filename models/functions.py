"""Computations of layers without parameters of their own: normalisation, SwiGLU, rotary
position embedding.

Dimensions: B rows, T tokens, D model, F feed-forward, N heads, H head size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of low frequencies, by the turns that a pair makes over the context."""

    # Low frequencies are divided by it.
    factor: float
    # Pairs with at most this many turns are divided by the whole factor.
    low_freq_factor: float
    # Pairs with at least this many turns are left as they are; between the two it is gradual.
    high_freq_factor: float
    # The context, in tokens, of the model before it was stretched.
    original_max_positions: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be above 0")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by a factor (2306.15595), which is all frequencies divided by it."""

    factor: float

    def __post_init__(self):
        _check_factor(self.factor)


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """A stretch that begins where a context is longer than those of training. Up to there RoPE is
    plain. Behind it the frequencies of all tokens depend on the length of the whole, so that what
    was sampled could not be computed again: such contexts are refused.
    """

    # The stretch of contexts that are longer; kept for the files of a model.
    factor: float
    # The longest context, in tokens, of the model before it is stretched.
    max_positions: int

    def __post_init__(self):
        _check_factor(self.factor)
        if type(self.max_positions) is not int or self.max_positions < 1:
            raise ValueError(
                f"max_positions={self.max_positions!r} must be a whole number from 1 on"
            )


def _check_factor(factor: float) -> None:
    if not 1 <= factor < math.inf:
        raise ValueError(f"factor={factor} must be at least 1")


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (2309.00071): low frequencies are divided, and rotated elements multiplied."""

    # Low frequencies are divided by it.
    factor: float
    # The context, in tokens, of the model before it was stretched.
    original_max_positions: int
    # Pairs with at least this many turns over that context are left as they are.
    beta_fast: float = 32.0
    # Pairs with at most this many turns are divided by the whole factor.
    beta_slow: float = 1.0
    # DeepSeek's two factors of ``magnitude``; 0 for none.
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    # The number by which rotated elements are multiplied; None for the one that follows.
    attention_factor: float | None = None
    # Whether the first and the last pair between the two betas are whole numbers.
    truncate: bool = True

    def __post_init__(self):
        for name in ("factor", "original_max_positions", "beta_fast", "beta_slow"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        for name in ("mscale", "mscale_all_dim"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast={self.beta_fast} must be at least beta_slow={self.beta_slow}"
            )

    def magnitude(self, mscale: float) -> float:
        """0.1 mscale ln(factor) + 1, which makes up for softer scores; 1 without a stretch."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def rotated_factor(self) -> float:
        """The number by which rotated elements are multiplied."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    def stretched(self, frequencies: Float[Array, " P"], theta: float) -> Float[Array, " P"]:
        """The frequencies of pairs, of which pair i had theta^(-i / P)."""
        count = frequencies.shape[0]

        def pair(turns: float) -> float:
            """The pair, not a whole number, that makes so many turns."""
            ratio = self.original_max_positions / (2 * math.pi * turns)
            return count * math.log(ratio) / math.log(theta)

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        width = high - low or 0.001
        # 0 for pairs that stay, 1 for those that are divided by the factor
        ramp = jnp.clip((jnp.arange(count, dtype=jnp.float32) - low) / width, 0.0, 1.0)
        return frequencies * (1.0 - ramp + ramp / self.factor)


# A stretch of RoPE.
Scaling = RopeScaling | LinearScaling | DynamicScaling | Yarn

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
