"""The passes over chosen blocks around the kernels: rows of a chunk of queries into tiles, and what
was found back.

A chunk bounds the rows in memory, n times those of its queries. All lists of all rows of the batch
go to the kernel together.

Dimensions: those of ``tiles``, and E = B P lists.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.selected.tiles import (
    Tiles,
    cut,
    cut_keys,
    cut_order,
    cut_picks,
    gather,
    gather_order,
    join,
    join_keys,
    merge,
    scatter,
    tile_count,
    tile_queries,
    tiles,
)
from pallas_kernels.selected.tuning import TuningConfig
from pallas_kernels.tokens import MASKED

# Least queries of a row in a chunk, however many rows there are, and least queries of a tile.
MIN_CHUNK, MIN_QUERIES = 128, 8


def forward(
    q,
    k,
    v,
    picks,
    q_order,
    k_order,
    *,
    size: int,
    kernels: ModuleType,
    tuning: TuningConfig,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) as ``selected_attention``, by the kernels of ``tpu`` or ``gpu``."""
    lists = picks.shape[2]
    chunk = _chunk(q.shape, tuning)
    groups = q.shape[2] // lists
    keys = cut_keys(k, v, k_order, size)
    index = functools.partial(
        _tiles, blocks=k.shape[1] // size, groups=groups, kernels=kernels, tuning=tuning
    )

    def one(_, xs):
        q, picks, order = xs
        found = index(picks)
        out, lse = kernels.forward(
            jax.vmap(gather)(q, found.query),
            _row_order(order, found.query, groups),
            *keys,
            found.block,
            found.starts,
            tuning=tuning,
            interpret=interpret,
        )
        return None, jax.vmap(lambda *x: merge(*x, groups, v.dtype))(out, lse, found)

    _, (out, lse) = jax.lax.scan(
        one, None, (_chunks(q, lists, chunk), *_indices(picks, q_order, chunk))
    )
    return _whole(out, q.shape), _whole(lse[..., None], (*q.shape[:3], 1))[..., 0]


def backward(
    q,
    k,
    v,
    picks,
    q_order,
    k_order,
    out,
    lse,
    d_out,
    d_lse,
    *,
    size,
    kernels,
    tuning,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv) of what ``forward`` found and its cotangents."""
    lists = picks.shape[2]
    chunk = _chunk(q.shape, tuning)
    groups = q.shape[2] // lists
    keys = cut_keys(k, v, k_order, size)
    index = functools.partial(
        _tiles, blocks=k.shape[1] // size, groups=groups, kernels=kernels, tuning=tuning
    )
    # a query that sees nothing has weights exp(-inf)
    seen = jnp.isfinite(lse)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    sums = jnp.stack([jnp.where(seen, lse, -MASKED), jnp.where(seen, delta, 0.0)], axis=-1)

    def one(d_keys, xs):
        q, d_out, sums, picks, order = xs
        found = index(picks)
        dq, d_keys = kernels.backward(
            jax.vmap(gather)(q, found.query),
            jax.vmap(gather)(d_out, found.query),
            jax.vmap(gather)(sums, found.query).swapaxes(2, 3),
            _row_order(order, found.query, groups),
            *keys,
            found.block,
            found.starts,
            d_keys,
            tuning=tuning,
            interpret=interpret,
        )
        return d_keys, jax.vmap(lambda *x: scatter(*x, groups, 0.0).sum(axis=1))(dq, found).astype(
            q.dtype
        )

    zeros = jnp.zeros((q.shape[0] * lists, *keys[0].shape[2:]), jnp.float32)
    queries = (_chunks(x, lists, chunk) for x in (q, d_out.astype(q.dtype), sums))
    d_keys, dq = jax.lax.scan(one, (zeros, zeros), (*queries, *_indices(picks, q_order, chunk)))
    dk, dv = (join_keys(x.reshape(q.shape[0], lists, *x.shape[1:]), k.shape) for x in d_keys)
    return _whole(dq, q.shape), dk.astype(k.dtype), dv.astype(v.dtype)


def most_tiles(
    q_shape: tuple[int, ...], picks_shape: tuple[int, ...], blocks: int, kernels, tuning
) -> int:
    """Tiles of all lists that a kernel is given at once."""
    (batch, _, lists, count) = picks_shape
    chunk = _chunk(q_shape, tuning)
    queries = _queries(chunk, count, blocks, q_shape[2] // lists, kernels, tuning)
    return batch * lists * tile_count(chunk * count, blocks, queries)


def _chunk(q_shape: tuple[int, ...], tuning: TuningConfig) -> int:
    """C: the queries of a row, while many rows share the memory of a chunk."""
    return min(q_shape[1], max(tuning.chunk // q_shape[0], MIN_CHUNK))


def _queries(
    chunk: int, picks: int, blocks: int, groups: int, kernels, tuning: TuningConfig
) -> int:
    """R; a block is chosen by no more queries than there are, but the TPU's products want some
    rows.
    """
    rows = kernels.tile_rows(tuning, chunk * picks // blocks * groups)
    return min(max(chunk, MIN_QUERIES), tile_queries(rows, groups))


def _tiles(picks: jax.Array, *, blocks: int, groups: int, kernels, tuning: TuningConfig) -> Tiles:
    """The tiles of the picks [E, C, n], of every list."""
    queries = _queries(*picks.shape[1:], blocks, groups, kernels, tuning)
    return jax.vmap(functools.partial(tiles, blocks=blocks, queries=queries))(picks)


def _row_order(order: jax.Array, query: jax.Array, groups: int) -> jax.Array:
    """[B, C] -> [E, L, R G] of the queries [E, L, R] of tiles."""
    order = jnp.repeat(order, query.shape[0] // order.shape[0], axis=0)
    return jnp.repeat(jax.vmap(gather_order)(order, query), groups, axis=2)


def _chunks(x: jax.Array, lists: int, chunk: int) -> jax.Array:
    """[B, T, N, H] -> [chunks, E, C, G, H]."""
    return _flat(cut(x, lists, chunk))


def _indices(picks: jax.Array, q_order: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """(picks [chunks, E, C, n], order [chunks, B, C]) of [B, T, P, n] and [B, T]."""
    return _flat(cut_picks(picks, chunk)), jnp.moveaxis(cut_order(q_order, chunk), 1, 0)


def _flat(x: jax.Array) -> jax.Array:
    """[B, P, chunks, ...] -> [chunks, E, ...]."""
    x = jnp.moveaxis(x, 2, 0)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _whole(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[chunks, E, C, G, H] -> [B, T, N, H]."""
    return join(jnp.moveaxis(x.reshape(x.shape[0], shape[0], -1, *x.shape[2:]), 0, 2), shape)
