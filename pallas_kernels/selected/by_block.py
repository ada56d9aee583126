"""The gradients of keys and values, block by block across all queries.

The inverse index (``tiles``) is that of all queries. A turn takes the next tiles of it, as many as
a chunk of queries has, so that as many rows are in memory. The gradient of a block is then written
about once. Chunk by chunk of the queries, all of dK and dV would be read and written for each
chunk, which grows with the square of the length: 540 MB for each of 256 chunks at a million tokens
(4 key/value heads of 128), about 2 s on a GPU.

Dimensions: those of ``tiles``, and E = B P lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.selected.rows import chunks, indices, tile_rows
from pallas_kernels.selected.tiles import Spans, Tiles, join_keys, spans, tile_count
from pallas_kernels.selected.tuning import TuningConfig


def backward_kv(
    queries,
    keys,
    *,
    index: Callable[[jax.Array], Tiles],
    chunk: int,
    kernels: ModuleType,
    tuning: TuningConfig,
    interpret: Any,
    shape: tuple[int, ...],
) -> list[jax.Array]:
    """[dk, dv], each of the keys' ``shape`` [B, S, K, H].

    queries: q, its cotangents, sums [B, T, N, 2], picks and order. keys: of ``cut_keys``. index:
    from picks [E, C, n] to the tiles of every list. chunk: C.
    """
    *queries, picks, q_order = queries
    (_, length, lists, count) = picks.shape
    # one chunk of all queries
    *rows, whole, order = (
        x[0]
        for x in (
            *(chunks(x, lists, length) for x in queries),
            *indices(picks, q_order, length),
        )
    )
    found = index(whole)
    (tiles, each) = found.query.shape[1:]
    together = min(tiles, tile_count(chunk * count, keys[0].shape[2], each))
    options = dict(kernels=kernels, tuning=tuning, interpret=interpret)
    if kernels.SPANS:
        # where the kernel gathers rows itself, one turn takes all
        gathers = kernels.gathers(each, rows[0].shape[2], tuning)
        together = tiles if gathers else together
        sums = _in_spans(rows, order, found, keys, together=together, **options)
    else:
        sums = _in_place(rows, order, found, keys, together=together, **options)
        sums = [x.reshape(picks.shape[0], lists, *x.shape[1:]) for x in sums]
    return [join_keys(x, shape) for x in sums]


def _in_place(rows, order, found: Tiles, keys, *, together, kernels, tuning, interpret):
    """(dk, dv) float32 [E, J, size, H], to which the kernel adds what ``together`` tiles found.

    A block is read and written again only where a turn begins within its tiles.
    """
    used = found.starts[:, -1]

    def one(turn, d_keys):
        begin = turn * together
        at = begin + jnp.arange(together)
        # a query past all others for tiles past the last one
        none = jnp.iinfo(found.query.dtype).max
        query = found.query.at[:, at].get(mode="fill", fill_value=none)
        tile_of, own = tile_rows(rows, order, query, kernels, tuning)
        d_keys = kernels.backward_kv(
            *tile_of,
            *keys,
            found.block.at[:, at].get(mode="clip"),
            jnp.clip(used - begin, 0, together),
            d_keys,
            **own,
            tuning=tuning,
            interpret=interpret,
        )
        return tuple(d_keys)

    # one for each list: lists of the same key/value head are summed at the end
    zeros = jnp.zeros((used.size, *keys[0].shape[2:]), jnp.float32)
    turns = -(-jnp.max(used) // together)
    return jax.lax.fori_loop(0, turns, one, (zeros, zeros))


def _in_spans(rows, order, found: Tiles, keys, *, together, kernels, tuning, interpret):
    """[dk, dv] [B, K, J, size, H] from the sums of spans of tiles.

    A turn takes as many spans as have no more than ``together`` tiles.
    """
    count = found.block.shape[1]
    most = min(tuning.span_kv, together)
    cut_up = jax.vmap(functools.partial(spans, count=count, most=most))(found.starts)
    used = cut_up.starts[:, -1]
    # spans of a turn: their share of all spans, so that a turn is seldom short of either
    of_turn = -(-cut_up.block.shape[1] * together // count)
    options = dict(tuning=tuning, interpret=interpret)

    def one(state):
        begin, *sums = state
        query, mine, taken = jax.vmap(functools.partial(turn, tiles=together, spans=of_turn))(
            begin, cut_up, found.query
        )
        tile_of, own = tile_rows(rows, order, query, kernels, tuning)
        parts = kernels.SPANS.backward_kv(*tile_of, *keys, mine, **own, **options)
        put = jax.vmap(jax.lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))
        # what lies past the spans that were taken is overwritten by the next turn
        return begin + taken, *(put(x, y, begin, 0) for x, y in zip(sums, parts, strict=True))

    begin = jnp.zeros_like(used)
    slab = kernels.SPANS.slabs(rows[0], keys[0], tuning)
    sums = jnp.zeros((used.size, cut_up.block.shape[1] + of_turn, *slab), jnp.float32)
    _, *sums = jax.lax.while_loop(lambda state: jnp.any(state[0] < used), one, (begin, sums, sums))
    total = functools.partial(kernels.SPANS.sum_spans, **options)
    return [total(x, cut_up.starts, keys[0].shape, keys[0].dtype) for x in sums]


def turn(begin, cut_up: Spans, query, tiles: int, spans: int):
    """The work of a list in a turn: (queries of its tiles [tiles, R], its spans, how many they
    are).

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
