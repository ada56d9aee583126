"""Arrays and tokens filled up to whole blocks, and what lies in padding."""

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


def without_padding(x: jax.Array, tokens: Tokens) -> jax.Array:
    """x [B, T, N, H] with zeros for padding, which may hold anything.

    A key that nobody sees has weight 0, but 0 times a value that is not finite is NaN, in the
    output and in every gradient. A mask on scores does not help; the keys and values themselves
    have to be finite. Done once per call, where XLA fuses it with what makes x.
    """
    return zeros_unless(x, tokens.segments > 0)


def zeros_unless(x: jax.Array, real: jax.Array) -> jax.Array:
    """x [B, T, N, H] with zeros where real [B, T] is False."""
    return jnp.where(real[..., None, None], x, jnp.zeros((), x.dtype))
