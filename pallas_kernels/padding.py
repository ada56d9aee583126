"""Arrays and tokens filled up to whole blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.tokens import Tokens


def pad(x: jax.Array, block: int, axis: int = 1) -> jax.Array:
    """x with ``axis`` padded by zeros to a multiple of ``block``; zero is padding in Tokens too."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths)


def pad_tokens(tokens: Tokens, block: int) -> Tokens:
    """``pad`` of every field."""
    return tokens.map(lambda x: pad(x, block))
