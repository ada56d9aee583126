"""Stretches of RoPE, by which a model reads longer contexts than it was trained with."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float


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
