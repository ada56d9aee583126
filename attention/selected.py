"""Attention over chosen blocks of keys, shared by NSA and MoBA: every query of a group reads its
own list of blocks.

The work goes in the order of blocks, not of queries. Of a chunk of queries, those that chose a
block are gathered into tiles. Products are then large, and a block is read once per tile. Every
query then merges what its tiles found. For each query and pick this copies one query. To lay each
query's keys side by side would copy ``size`` keys instead. Short rows keep all their scores in
memory, as in ``dense_attention``.

Dimensions: B rows, T queries, S places of keys, N query heads, K key/value heads, P lists per query
(K or N), G = N / P query heads of a list, H head size, n picks, J = S / size blocks, C queries of a
chunk, L tiles, R queries of a tile.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.blockwise import DIRECT, XLA, check_heads
from pallas_kernels.finite import cleaned, cotangents, guarded
from pallas_kernels.saved import attended
from pallas_kernels.selected import api as kernels
from pallas_kernels.selected.tiles import (
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
    tile_queries,
)
from pallas_kernels.selected.tiles import tiles as index_tiles
from pallas_kernels.softmax import masked_attention
from pallas_kernels.tokens import MASKED

# Rows of a chunk, C n G, whose results are in memory together.
CHUNK = 2**19
# Rows of a tile, R G.
ROWS = 128
# About how many scores are computed together, so that they stay in the cache.
SCORES = 2**18


def selected_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    picks: Int[Array, "B T P n"],
    q_order: Int[Array, "B T"],
    k_order: Int[Array, "B S"],
    *,
    size: int,
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention over the chosen blocks, scores scaled by 1/sqrt(H), in float32 or wider.

    A query sees a place of a block it chose when the place's order is at most its own.

    picks: numbers of blocks of ``size`` places, each at most once, -1 for none. P is K where the
      heads of a group share a list, and N where every head has its own.
    k_order: past all others for an empty place.
    implementation: as for ``dense_attention``.

    Returns (out in v's dtype, lse) as ``dense_attention``.
    """
    check_heads(q, k)
    if picks.shape[2] not in (k.shape[2], q.shape[2]):
        raise ValueError(f"picks for {picks.shape[2]} heads, expected {k.shape[2]} or {q.shape[2]}")

    def in_xla():
        if k.shape[1] <= DIRECT:
            return masked_attention(q, k, v, _mask(picks, q_order, k_order, size))
        found = guarded(q, k, v, None, k_order < kernels.EMPTY)
        return _selected(*found, picks, q_order, k_order, size)

    if implementation == XLA:
        return in_xla()
    choice = dict(implementation=implementation, interpret=interpret, fallback=in_xla)
    return kernels.selected_attention(q, k, v, picks, q_order, k_order, size=size, **choice)


def _mask(picks, q_order, k_order, size: int) -> Bool[Array, "B P T S"]:
    """True where a query sees a place by a list of picks."""
    chosen = jnp.any(picks[..., None] == jnp.arange(k_order.shape[1] // size), axis=-2)
    chosen = (
        jnp.repeat(chosen, size, axis=-1) & (k_order[:, None] <= q_order[..., None])[:, :, None]
    )
    return chosen.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _selected(q, k, v, picks, q_order, k_order, size):
    return _forward(q, k, v, picks, q_order, k_order, size)[0]


def _forward(q, k, v, picks, q_order, k_order, size):
    wide = jnp.promote_types(jnp.float32, q.dtype)
    lists = picks.shape[2]
    chunk_size = _chunk_size(q, picks)

    def chunk(keys, xs):
        (k, v, k_order), (q, picks, q_order) = keys, xs
        tiles, groups = _tiles(picks, k, q)

        # a tile meets its whole block at once, so no running maximum is needed
        def group(xs):
            block, query = xs
            scores = _scores(gather(q, query), k, q_order, k_order, block, query)
            top = jnp.max(scores, axis=-1)
            weights = jnp.exp(scores - top[..., None])
            total = jnp.sum(weights, axis=-1)
            out = jnp.einsum(
                "lrs,lsh->lrh", weights.astype(v.dtype), v[block], preferred_element_type=wide
            )
            return out / total[..., None], top + jnp.log(total)

        out, lse = (_flat(x) for x in jax.lax.map(group, groups))
        return keys, merge(out, lse, tiles, q.shape[1], v.dtype)

    queries = (
        cut(q, lists, chunk_size),
        cut_picks(picks, chunk_size),
        cut_order(q_order, chunk_size),
    )
    _, (out, lse) = _each_list(chunk, lambda keys: keys, queries, cut_keys(k, v, k_order, size))
    out = join(out, q.shape)
    lse = join(lse[..., None], (*q.shape[:3], 1))[..., 0]
    out, lse = attended(out, lse)
    return (out, lse), (q, k, v, picks, q_order, k_order, out, lse)


def _backward(size, residuals, given):
    q, k, v, picks, q_order, k_order, out, lse = residuals
    q, k = (cleaned(x) for x in (q, k))
    d_out, delta, lse = cotangents(out, lse, *given)
    wide = jnp.promote_types(jnp.float32, q.dtype)
    lists = picks.shape[2]
    chunk_size = _chunk_size(q, picks)
    scale = q.shape[-1] ** -0.5

    # dk and dv are carried from chunk to chunk; dq of a chunk is complete with it
    def chunk(carry, xs):
        (k, v, k_order, dk, dv), (q, picks, q_order, d_out, delta, lse) = carry, xs
        tiles, groups = _tiles(picks, k, q)

        def group(sums, xs):
            block, query = xs
            rows = gather(q, query)
            d_rows = gather(d_out, query)
            weights = jnp.exp(_scores(rows, k, q_order, k_order, block, query) - gather(lse, query))
            d_weights = jnp.einsum("lrh,lsh->lrs", d_rows, v[block], preferred_element_type=wide)
            d_scores = (weights * (d_weights - gather(delta, query)) * scale).astype(q.dtype)
            dq = jnp.einsum("lrs,lsh->lrh", d_scores, k[block], preferred_element_type=wide)
            dk = jnp.einsum("lrs,lrh->lsh", d_scores, rows, preferred_element_type=wide)
            dv = jnp.einsum(
                "lrs,lrh->lsh", weights.astype(q.dtype), d_rows, preferred_element_type=wide
            )
            # several tiles of a group may have the same block: ``add`` sums them all
            return tuple(x.at[block].add(y) for x, y in zip(sums, (dk, dv), strict=True)), dq

        (dk, dv), dq = jax.lax.scan(group, (dk, dv), groups)
        return (k, v, k_order, dk, dv), jnp.sum(scatter(_flat(dq), tiles, q.shape[1], 0.0), axis=1)

    def start(keys):
        return (*keys, jnp.zeros(keys[0].shape, wide), jnp.zeros(keys[1].shape, wide))

    queries = (
        cut(q, lists, chunk_size),
        cut_picks(picks, chunk_size),
        cut_order(q_order, chunk_size),
    )
    queries += tuple(
        cut(x, lists, chunk_size) for x in (d_out.astype(q.dtype), delta[..., None], lse[..., None])
    )
    carry, dq = _each_list(chunk, start, queries, cut_keys(k, v, k_order, size))
    dk, dv = (join_keys(x, k.shape) for x in carry[3:])
    return (
        join(dq, q.shape).astype(q.dtype),
        dk.astype(k.dtype),
        dv.astype(v.dtype),
        None,
        None,
        None,
    )


_selected.defvjp(_forward, _backward)


def _chunk_size(q, picks) -> int:
    """C, as large as CHUNK allows: the more queries a chunk has, the fewer tiles are half empty."""
    return max(1, min(q.shape[1], CHUNK // (picks.shape[3] * q.shape[2] // picks.shape[2])))


def _tiles(picks, k, q):
    """The tiles of picks [C, n], and their (blocks, queries) in groups that are computed together,
    [groups, group, ...].
    """
    group = max(1, SCORES // (ROWS * k.shape[1]))
    tiles = index_tiles(picks, k.shape[0], tile_queries(ROWS, q.shape[1]), group)
    return tiles, tuple(x.reshape(-1, group, *x.shape[1:]) for x in (tiles.block, tiles.query))


def _flat(x: jax.Array) -> jax.Array:
    """[groups, group, ...] -> [L, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _scores(rows, k, q_order, k_order, block, query):
    """Masked scores [L, R G, size] of rows [L, R G, H], each tile with its own block."""
    wide = jnp.promote_types(jnp.float32, rows.dtype)
    scores = (
        jnp.einsum("lrh,lsh->lrs", rows, k[block], preferred_element_type=wide)
        * rows.shape[-1] ** -0.5
    )
    order = gather_order(q_order, query)
    seen = k_order[block][:, None] <= order[..., None]
    grouped = scores.reshape(*order.shape, -1, scores.shape[-1])
    return jnp.where(seen[:, :, None], grouped, MASKED).reshape(scores.shape)


def _each_list(chunk, start, queries, keys):
    """Scans ``chunk`` over the chunks of every list of every row.

    queries: q, picks, order and others, [B, P, chunks, ...] each, but the order [B, chunks, C].
    keys: k, v and order, [B, K, ...] each, but the order [B, J, size]. start: a function that makes
    the first carry from the keys of one key/value head. Returns (the last carries [B, P, ...], the
    results [B, P, chunks, ...]).
    """
    q, picks, q_order, *others = queries
    k, v, k_order = keys
    lists = q.shape[1]
    heads = k.shape[1]

    def row(xs):
        (q, picks, q_order, *others), (k, v, k_order) = xs

        def one(at):
            head = at * heads // lists
            mine = (q[at], picks[at], q_order, *(x[at] for x in others))
            carry, results = jax.lax.scan(chunk, start((k[head], v[head], k_order)), mine)
            return carry, results

        return jax.lax.map(one, jnp.arange(lists))

    return jax.lax.map(row, ((q, picks, q_order, *others), (k, v, k_order)))
