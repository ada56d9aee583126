"""What surrounds the kernels over chosen blocks, forward and backward.

A pass takes one chunk of queries after another. It gathers the rows of the chunk into tiles, calls
a kernel, and brings what the kernel found back into the order of queries. A query has a row in a
tile for each of its n picks, so the size of a chunk bounds how many rows are in memory. The kernel
gets all lists of all rows of the batch together.

On GPU the gradients of keys and values go in the order of blocks instead: a turn takes the next
tiles of the index of all queries, as many as a chunk of queries has. The gradient of a block is
then written once. Chunk by chunk of the queries, all of dK and dV would be read and written for
each chunk, which grows with the square of the length: 540 MB for each of 256 chunks at a million
tokens (4 key/value heads of 128), about 2 s.

Dimensions: those of ``tiles``, and E = B P lists.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.selected.tiles import (
    Spans,
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
    spans,
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
    """(out, lse) as ``selected_attention``. kernels: the module ``tpu`` or ``gpu``."""
    lists = picks.shape[2]
    chunk = _chunk(q.shape, tuning)
    groups = q.shape[2] // lists
    keys = cut_keys(k, v, k_order, size)
    index = functools.partial(
        _tiles, blocks=k.shape[1] // size, groups=groups, kernels=kernels, tuning=tuning
    )

    # one chunk of all lists at a time; forward, nothing is carried from chunk to chunk
    def one(_, xs):
        q, picks, order = xs
        found = index(picks)
        rows, own = _tile_rows((q,), order, found.query, kernels, tuning)
        out, lse = kernels.forward(
            *rows, *keys, found.block, found.starts, **own, tuning=tuning, interpret=interpret
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
    """(dq, dk, dv), from the arguments of ``forward``, its results and their cotangents."""
    lists = picks.shape[2]
    chunk = _chunk(q.shape, tuning)
    groups = q.shape[2] // lists
    keys = cut_keys(k, v, k_order, size)
    index = functools.partial(
        _tiles, blocks=k.shape[1] // size, groups=groups, kernels=kernels, tuning=tuning
    )
    # The lse of a query that sees nothing becomes +1e30 (-MASKED): all its weights, exp(score -
    # lse), are then 0.
    seen = jnp.isfinite(lse)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    sums = jnp.stack([jnp.where(seen, lse, -MASKED), jnp.where(seen, delta, 0.0)], axis=-1)

    queries = (q, d_out.astype(q.dtype), sums, picks, q_order)
    options = dict(index=index, chunk=chunk, kernels=kernels, tuning=tuning, interpret=interpret)
    if kernels.BY_BLOCK:
        dq = _backward_q(queries, keys, **options)
        dk, dv = _backward_kv(queries, keys, **options)
        dk, dv = (join_keys(x, k.shape) for x in (dk, dv))
    else:
        dq, dk, dv = _backward_together(queries, keys, **options)
        dk, dv = (join_keys(x.reshape(q.shape[0], lists, *x.shape[1:]), k.shape) for x in (dk, dv))
    return _whole(dq, q.shape), dk.astype(k.dtype), dv.astype(v.dtype)


def _backward_together(queries, keys, *, index, chunk, kernels, tuning, interpret):
    """(dq [chunks, E, C, G, H], dk and dv [E, J, size, H]) where one kernel computes all three."""
    *queries, picks, q_order = queries
    lists = picks.shape[2]
    groups = queries[0].shape[2] // lists

    # The sums of the keys' gradients go from chunk to chunk. Those of the queries are complete with
    # their chunk: a query's picks all lie in it.
    def one(d_keys, xs):
        *rows, picks, order = xs
        found = index(picks)
        tile_rows, _ = _tile_rows(rows, order, found.query, kernels, tuning)
        dq, d_keys = kernels.backward(
            *tile_rows,
            *keys,
            found.block,
            found.starts,
            d_keys,
            tuning=tuning,
            interpret=interpret,
        )
        return d_keys, _sum_picks(dq, found, groups, rows[0].dtype)

    # in float32, since every chunk adds to them, and one for each list: lists of the same key/value
    # head are summed at the end
    zeros = jnp.zeros((picks.shape[0] * lists, *keys[0].shape[2:]), jnp.float32)
    xs = (*(_chunks(x, lists, chunk) for x in queries), *_indices(picks, q_order, chunk))
    (dk, dv), dq = jax.lax.scan(one, (zeros, zeros), xs)
    return dq, dk, dv


def _backward_q(queries, keys, *, index, chunk, kernels, tuning, interpret):
    """dq [chunks, E, C, G, H], chunk by chunk of the queries."""
    *queries, picks, q_order = queries
    lists = picks.shape[2]
    groups = queries[0].shape[2] // lists

    def one(_, xs):
        *rows, picks, order = xs
        found = index(picks)
        tile_rows, own = _tile_rows(rows, order, found.query, kernels, tuning)
        dq = kernels.backward_q(
            *tile_rows, *keys, found.block, found.starts, **own, tuning=tuning, interpret=interpret
        )
        return None, _sum_picks(dq, found, groups, rows[0].dtype)

    xs = (*(_chunks(x, lists, chunk) for x in queries), *_indices(picks, q_order, chunk))
    return jax.lax.scan(one, None, xs)[1]


def _backward_kv(queries, keys, *, index, chunk, kernels, tuning, interpret):
    """(dk, dv) [B, K, J, size, H], block by block across all queries.

    The inverse index is that of all queries. A turn of the loop takes as many spans of tiles as
    have no more tiles than a chunk of queries, so that as many rows are in memory. Where the kernel
    gathers rows itself, one turn takes all.
    """
    *queries, picks, q_order = queries
    (lists, length) = (picks.shape[2], picks.shape[1])
    blocks = keys[0].shape[2]
    # one chunk of all queries
    *rows, whole, order = (
        x[0]
        for x in (
            *(_chunks(x, lists, length) for x in queries),
            *_indices(picks, q_order, length),
        )
    )
    found = index(whole)
    count = found.block.shape[1]
    together = count
    if not kernels.gathers(found.query.shape[2], rows[0].shape[2], tuning):
        together = min(count, tile_count(chunk * picks.shape[3], blocks, found.query.shape[2]))
    most = min(tuning.span_kv, together)
    cut_up = jax.vmap(functools.partial(spans, count=count, most=most))(found.starts)
    used = cut_up.starts[:, -1]
    # spans of a turn: their share of all spans, so that a turn is seldom short of either
    turn = -(-cut_up.block.shape[1] * together // count)
    options = dict(tuning=tuning, interpret=interpret)

    def one(state):
        begin, *sums = state
        query, mine, taken = jax.vmap(functools.partial(_turn, tiles=together, spans=turn))(
            begin, cut_up, found.query
        )
        tile_rows, own = _tile_rows(rows, order, query, kernels, tuning)
        parts = kernels.BY_BLOCK.backward_kv(*tile_rows, *keys, mine, **own, **options)
        put = jax.vmap(jax.lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))
        # what lies past the spans that were taken is overwritten by the next turn
        return begin + taken, *(put(x, y, begin, 0) for x, y in zip(sums, parts, strict=True))

    begin = jnp.zeros_like(used)
    slab = kernels.BY_BLOCK.slabs(rows[0], keys[0], tuning)
    sums = jnp.zeros((used.size, cut_up.block.shape[1] + turn, *slab), jnp.float32)
    _, *sums = jax.lax.while_loop(lambda state: jnp.any(state[0] < used), one, (begin, sums, sums))
    total = functools.partial(kernels.BY_BLOCK.sum_spans, **options)
    return [total(x, cut_up.starts, keys[0].shape, keys[0].dtype) for x in sums]


def _turn(begin, cut_up: Spans, query, tiles: int, spans: int):
    """What a list does in a turn: (queries of its tiles [tiles, R], its spans, how many they are).

    begin: the first span that is left. cut_up: all spans. query: of all tiles, [L, R]. tiles,
    spans: most of each in a turn.
    """
    at = begin + jnp.arange(spans)
    block, first, last = (x.at[at].get(mode="fill", fill_value=0) for x in cut_up[:3])
    start = first[0]
    # spans follow each other, so those that fit come first; a span never has more than ``tiles``
    fits = (at < cut_up.starts[-1]) & (last - start <= tiles)
    first, last = (jnp.where(fits, x - start, 0) for x in (first, last))
    # a query past all others for tiles past the last one
    own = query.at[start + jnp.arange(tiles)].get(
        mode="fill", fill_value=jnp.iinfo(query.dtype).max
    )
    return own, Spans(block, first, last, cut_up.starts), jnp.sum(fits, dtype=jnp.int32)


def _tile_rows(queries, order, query, kernels: ModuleType, tuning: TuningConfig):
    """What the kernels get of queries, and of cotangents and sums if there are any, [E, C, G, H]
    each: (arrays, options).

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


def _sum_picks(dq, found: Tiles, groups: int, dtype):
    """The gradient of every query [E, C, G, H], summed over its picks."""
    return jax.vmap(lambda *x: scatter(*x, groups, 0.0).sum(axis=1))(dq, found).astype(dtype)


def most_tiles(
    q_shape: tuple[int, ...], picks_shape: tuple[int, ...], blocks: int, kernels, tuning
) -> int:
    """How many tiles a kernel is given at once, of all lists together."""
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


def _row_order(order: jax.Array, query: jax.Array, groups: int) -> jax.Array:
    """The order of every row of tiles: [B, C] at queries [E, L, R] -> [E, L, R G]."""
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
