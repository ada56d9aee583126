"""Layout of queries, and of what belongs to them, in chunks and in the tiles of an index.

Dimensions: those of ``tiles``, and E = B P lists.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.selected.tiles import cut, cut_order, cut_picks, gather, gather_order, join
from pallas_kernels.selected.tuning import TuningConfig


def chunks(x: jax.Array, lists: int, chunk: int) -> jax.Array:
    """[B, T, N, H] -> [chunks, E, C, G, H]."""
    return _flat(cut(x, lists, chunk))


def indices(picks: jax.Array, q_order: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """(picks [chunks, E, C, n], order [chunks, B, C]) of [B, T, P, n] and [B, T]."""
    return _flat(cut_picks(picks, chunk)), jnp.moveaxis(cut_order(q_order, chunk), 1, 0)


def whole(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[chunks, E, C, G, H] -> [B, T, N, H]."""
    return join(jnp.moveaxis(x.reshape(x.shape[0], shape[0], -1, *x.shape[2:]), 0, 2), shape)


def tile_rows(queries, order, query, kernels: ModuleType, tuning: TuningConfig):
    """The arguments of the kernels that come from queries, and from cotangents and sums if there
    are any, [E, C, G, H] each: (arrays, options).

    The arrays are in tiles, or as they are where the kernel gathers them by ``query`` [E, L, R].
    """
    groups = queries[0].shape[2]
    if kernels.gathers(query.shape[2], groups, tuning):
        own = {"query": query}
    else:
        own = {}
        queries = [jax.vmap(gather)(x, query) for x in queries]
        order = _row_order(order, query, groups)
    sums = [x.swapaxes(2, 3) for x in queries[2:]]
    return (*queries[:2], *sums, order), own


def _row_order(order: jax.Array, query: jax.Array, groups: int) -> jax.Array:
    """The order of every row of tiles: [B, C] at queries [E, L, R] -> [E, L, R G]."""
    order = jnp.repeat(order, query.shape[0] // order.shape[0], axis=0)
    return jnp.repeat(jax.vmap(gather_order)(order, query), groups, axis=2)


def _flat(x: jax.Array) -> jax.Array:
    """[B, P, chunks, ...] -> [chunks, E, ...]."""
    x = jnp.moveaxis(x, 2, 0)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
