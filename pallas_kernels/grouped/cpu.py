"""Grouped products on CPU: a loop over pieces of equal size, each with one matrix.

XLA's own ragged product becomes one product of all rows with all matrices there: at 8,192 rows and
8 matrices of 128 x 96 it takes 102 ms where this loop takes 10. Here, too, the result of a row has
the same bits wherever the row stands, which the engine promises: each piece is a product of one
fixed shape.

Dimensions: P rows, E groups, D and F sizes of a matrix.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped.blocks import TuningConfig

DTYPES = ("float32", "bfloat16", "float16", "float64")


def product(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool,
    tuning: TuningConfig,
    interpret: Any = False,
) -> jax.Array:
    """As ``reference.product``; rows behind the last group's must be 0."""
    tile, count, where = _pieces(tuning.rows, sizes)
    w = jnp.swapaxes(w, 1, 2) if transposed else w
    # the last piece may reach past the last row
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def step(index, out):
        group, first, _ = where(index)
        rows = jax.lax.dynamic_slice_in_dim(padded, first, tile)
        found = rows @ jax.lax.dynamic_index_in_dim(w, group, keepdims=False)
        # Rows of the next group get a wrong result here. Its own first piece begins at the first of
        # them and comes next, so it is overwritten.
        return jax.lax.dynamic_update_slice_in_dim(out, found, first, 0)

    out = jax.lax.fori_loop(0, count, step, jnp.zeros((len(padded), w.shape[2]), x.dtype))
    return out[: len(x)]


def outer_product(
    x: jax.Array, y: jax.Array, sizes: jax.Array, *, tuning: TuningConfig, interpret: Any = False
) -> jax.Array:
    """As ``reference.outer_product``."""
    tile, count, where = _pieces(tuning.rows, sizes)
    rows, others = (jnp.pad(z, ((0, tile), (0, 0))) for z in (x, y))
    # added up in float32: a group can have many pieces
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def step(index, total):
        group, first, end = where(index)
        own = (first + jnp.arange(tile) < end)[:, None]
        part = jax.lax.dynamic_slice_in_dim(rows, first, tile)
        other = jnp.where(own, jax.lax.dynamic_slice_in_dim(others, first, tile), 0)
        so_far = jax.lax.dynamic_index_in_dim(total, group, keepdims=False)
        so_far = so_far + (part.T @ other).astype(wide)
        return jax.lax.dynamic_update_index_in_dim(total, so_far, group, 0)

    shape = (len(sizes), x.shape[1], y.shape[1])
    return jax.lax.fori_loop(0, count, step, jnp.zeros(shape, wide)).astype(x.dtype)


def _pieces(tile: int, sizes: jax.Array):
    """(rows of a piece, how many pieces there are, a function of a piece's number that says its
    group, its first row and the end of its group's rows).
    """
    ends = jnp.cumsum(sizes)
    counts = -(-sizes // tile)
    behind = jnp.cumsum(counts)

    def where(index):
        group = jnp.searchsorted(behind, index, side="right")
        number = index - (behind[group] - counts[group])
        return group, ends[group] - sizes[group] + number * tile, ends[group]

    return tile, behind[-1], where
