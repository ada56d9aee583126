"""The code around the kernels over chosen blocks, forward and backward.

A pass takes one chunk of queries after another. It gathers the rows of the chunk into tiles, calls
a kernel, and brings what the kernel found back into the order of queries. A query has a row in a
tile for each of its n picks, so the size of a chunk bounds how many rows are in memory. The kernel
gets all lists of all rows of the batch together. Where neighbouring queries chose much the same
(``unions``), tiles are of neighbours instead, and nothing is gathered.

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
from pallas_kernels.selected import unions
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
    index = _index(q, k, picks, size, kernels, tuning)
    plan = _union_plan(q, keys[0], picks, kernels, tuning)

    # one chunk of all lists at a time; forward, nothing is carried from chunk to chunk
    def one(_, xs):
        q, picks, order = xs

        def by_index():
            found = index(picks)
            rows, own = tile_rows((q,), order, found.query, kernels, tuning)
            out, lse = kernels.forward(
                *rows, *keys, found.block, found.starts, **own, tuning=tuning, interpret=interpret
            )
            return jax.vmap(lambda *x: merge(*x, groups, v.dtype))(out, lse, found)

        def by_union(visits):
            out, lse = kernels.UNIONS.forward(
                *_in_tiles((q,), order, plan),
                *keys,
                visits,
                queries=plan.queries,
                width=plan.width,
                interpret=interpret,
            )
            lse = unions.from_tiles(lse[..., None], (*q.shape[:3], 1))[..., 0]
            return unions.from_tiles(out, q.shape), lse

        return None, _either(by_index, by_union, picks, plan)

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
    plan = _union_plan(q, keys[0], picks, kernels, tuning)
    dq = _backward_q(queries, keys, plan=plan, **options)
    dk, dv = backward_kv(queries, keys, shape=k.shape, **options)
    return whole(dq, q.shape), dk.astype(k.dtype), dv.astype(v.dtype)


def _backward_q(queries, keys, *, index, plan, chunk, kernels, tuning, interpret):
    """dq [chunks, E, C, G, H], chunk by chunk of the queries."""
    *queries, picks, q_order = queries
    lists = picks.shape[2]
    groups = queries[0].shape[2] // lists

    def one(_, xs):
        *rows, picks, order = xs

        def by_index():
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
            return summed.astype(rows[0].dtype)

        def by_union(visits):
            dq = kernels.UNIONS.backward_q(
                *_in_tiles(rows, order, plan),
                *keys,
                visits,
                queries=plan.queries,
                width=plan.width,
                interpret=interpret,
            )
            # a query that sees nothing may hold anything, and has no gradient
            seen = rows[2][..., :1] < -MASKED / 2
            return jnp.where(seen, unions.from_tiles(dq, rows[0].shape), jnp.zeros((), dq.dtype))

        return None, _either(by_index, by_union, picks, plan)

    xs = (*(chunks(x, lists, chunk) for x in queries), *indices(picks, q_order, chunk))
    return jax.lax.scan(one, None, xs)[1]


def _either(by_index: Callable, by_union: Callable, picks: jax.Array, plan: unions.Plan | None):
    """A chunk's results by the unions of neighbours, or by the index where these are too large.

    picks: int32 [E, C, n].
    """
    if plan is None:
        return by_index()
    visits = jax.vmap(functools.partial(unions.visits, plan=plan))(picks)
    if plan.always:
        return by_union(visits)
    fits = jnp.max(visits.used) <= plan.steps
    return jax.lax.cond(fits, by_union, lambda _: by_index(), visits)


def _in_tiles(queries, order, plan: unions.Plan) -> tuple[jax.Array, ...]:
    """Queries, perhaps cotangents and sums, [E, C, G, H] each, and their order [B, C], in tiles of
    neighbours.
    """
    (lists, _, groups, _) = queries[0].shape
    found = [unions.tile_rows(x, plan) for x in queries]
    sums = [x.swapaxes(2, 3) for x in found[2:]]
    return (*found[:2], *sums, unions.tile_order(order, lists, groups, plan))


def _index(q, k, picks, size: int, kernels, tuning: TuningConfig) -> Callable[[jax.Array], Tiles]:
    """A function from picks [E, C, n] to the tiles of every list."""
    groups = q.shape[2] // picks.shape[2]
    blocks = k.shape[1] // size
    return functools.partial(_tiles, blocks=blocks, groups=groups, kernels=kernels, tuning=tuning)


def _union_plan(q, k, picks, kernels, tuning: TuningConfig) -> unions.Plan | None:
    """Way of a chunk through unions of blocks, None where it has none. k: [B, K, J, size, H]."""
    if kernels.UNIONS is None:
        return None
    (batch, _, lists, count) = picks.shape
    (blocks, size, head_dim) = k.shape[2:]
    return unions.plan(
        _chunk(q.shape, tuning),
        batch * lists,
        count,
        blocks,
        q.shape[2] // lists,
        size,
        head_dim,
        k.dtype.itemsize,
        tuning,
    )


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
