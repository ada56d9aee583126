"""The code around the kernels over chosen blocks, forward and backward.

A pass takes one chunk of queries after another. It gathers the rows of the chunk into tiles, calls
a kernel, and brings what the kernel found back into the order of queries. A query has a row in a
tile for each of its n picks, so the size of a chunk bounds how many rows are in memory. The kernel
gets all lists of all rows of the batch together.

The gradients of keys and values go in the order of blocks (``by_block``).

Dimensions: those of ``tiles``, and E = B P lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.finite import cotangents
from pallas_kernels.selected.by_block import backward_kv
from pallas_kernels.selected.rows import chunks, indices, tile_rows, whole
from pallas_kernels.selected.tiles import (
    Tiles,
    cut_keys,
    merge,
    scatter,
    tile_count,
    tile_queries,
    tiles,
)
from pallas_kernels.selected.tuning import TuningConfig

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
    """(out, lse) as ``selected_attention``. kernels: the module ``tpu`` or ``gpu``."""
    lists = picks.shape[2]
    chunk = _chunk(q.shape, tuning)
    groups = q.shape[2] // lists
    keys = cut_keys(k, v, k_order, size)
    index = _index(q, k, picks, size, kernels, tuning)

    # one chunk of all lists at a time; forward, nothing is carried from chunk to chunk
    def one(_, xs):
        q, picks, order = xs
        found = index(picks)
        rows, own = tile_rows((q,), order, found.query, kernels, tuning)
        out, lse = kernels.forward(
            *rows, *keys, found.block, found.starts, **own, tuning=tuning, interpret=interpret
        )
        return None, jax.vmap(lambda *x: merge(*x, groups, v.dtype))(out, lse, found)

    _, (out, lse) = jax.lax.scan(
        one, None, (chunks(q, lists, chunk), *indices(picks, q_order, chunk))
    )
    return whole(out, q.shape), whole(lse[..., None], (*q.shape[:3], 1))[..., 0]


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
    """(dq, dk, dv), from the arguments of ``forward``, its results and their cotangents.

    q and k are finite, as v is: see ``finite``.
    """
    keys = cut_keys(k, v, k_order, size)
    d_out, delta, lse = cotangents(out, lse, d_out, d_lse)
    sums = jnp.stack([lse, delta], axis=-1)

    queries = (q, d_out.astype(q.dtype), sums, picks, q_order)
    options = dict(
        index=_index(q, k, picks, size, kernels, tuning),
        chunk=_chunk(q.shape, tuning),
        kernels=kernels,
        tuning=tuning,
        interpret=interpret,
    )
    dq = _backward_q(queries, keys, **options)
    dk, dv = backward_kv(queries, keys, shape=k.shape, **options)
    return whole(dq, q.shape), dk.astype(k.dtype), dv.astype(v.dtype)


def _backward_q(queries, keys, *, index, chunk, kernels, tuning, interpret):
    """dq [chunks, E, C, G, H], chunk by chunk of the queries."""
    *queries, picks, q_order = queries
    lists = picks.shape[2]
    groups = queries[0].shape[2] // lists

    def one(_, xs):
        *rows, picks, order = xs
        found = index(picks)
        tile_of, own = tile_rows(rows, order, found.query, kernels, tuning)
        dq = kernels.backward_q(
            *tile_of,
            *keys,
            found.block,
            found.starts,
            **own,
            tuning=tuning,
            interpret=interpret,
        )
        # every query's gradient is summed over its picks
        summed = jax.vmap(lambda *x: scatter(*x, groups, 0.0).sum(axis=1))(dq, found)
        return None, summed.astype(rows[0].dtype)

    xs = (*(chunks(x, lists, chunk) for x in queries), *indices(picks, q_order, chunk))
    return jax.lax.scan(one, None, xs)[1]


def _index(q, k, picks, size: int, kernels, tuning: TuningConfig) -> Callable[[jax.Array], Tiles]:
    """A function from picks [E, C, n] to the tiles of every list."""
    groups = q.shape[2] // picks.shape[2]
    blocks = k.shape[1] // size
    return functools.partial(_tiles, blocks=blocks, groups=groups, kernels=kernels, tuning=tuning)


def most_tiles(
    q_shape: tuple[int, ...], picks_shape: tuple[int, ...], blocks: int, kernels, tuning
) -> int:
    """The number of tiles that a kernel is given at once, of all lists together."""
    (batch, _, lists, count) = picks_shape
    chunk = _chunk(q_shape, tuning)
    queries = _queries(chunk, count, blocks, q_shape[2] // lists, kernels, tuning)
    return batch * lists * tile_count(chunk * count, blocks, queries)


def _chunk(q_shape: tuple[int, ...], tuning: TuningConfig) -> int:
    """C, the queries of one row in a chunk; the rows of the batch share ``tuning.chunk``."""
    return min(q_shape[1], max(tuning.chunk // q_shape[0], MIN_CHUNK))


def _queries(
    chunk: int, picks: int, blocks: int, groups: int, kernels, tuning: TuningConfig
) -> int:
    """R, the queries of a tile.

    A chunk of few queries needs no more rows than it has queries, but no fewer than MIN_QUERIES,
    since the TPU's products need some rows.
    """
    # the argument is how many rows choose a block on average
    rows = kernels.tile_rows(tuning, chunk * picks // blocks * groups)
    return min(max(chunk, MIN_QUERIES), tile_queries(rows, groups))


def _tiles(picks: jax.Array, *, blocks: int, groups: int, kernels, tuning: TuningConfig) -> Tiles:
    """The tiles of every list, of picks [E, C, n]."""
    queries = _queries(*picks.shape[1:], blocks, groups, kernels, tuning)
    return jax.vmap(functools.partial(tiles, blocks=blocks, queries=queries))(picks)
