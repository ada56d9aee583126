"""Filling arrays and tokens up to whole blocks, and clearing what lies in padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.tokens import Tokens


def pad(x: jax.Array, block: int, axis: int = 1) -> jax.Array:
    """x with ``axis`` padded by zeros to a multiple of ``block``.

    Zeros are right for the fields of Tokens too: segment 0 is padding.
    """
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths)


def pad_tokens(tokens: Tokens, block: int) -> Tokens:
    """``pad`` of every field."""
    return tokens.map(lambda x: pad(x, block))


def zeros_unless(x: jax.Array, real: jax.Array) -> jax.Array:
    """x [B, T, N, H] with zeros where real [B, T] is False."""
    return jnp.where(real[..., None, None], x, jnp.zeros((), x.dtype))
