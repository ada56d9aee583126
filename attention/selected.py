"""Attention over chosen blocks of keys, shared by NSA and MoBA: every query of a group reads its own list of blocks.

The work is ordered by block instead of by query: of a chunk of queries, those that chose a block are gathered into
tiles, so that products are large and a block is read once per tile; every query then merges its tiles. Copying each
query's keys side by side would move ``size`` keys for every query and pick instead of one query. Short rows keep all
their scores in memory, as in ``dense_attention``.

Dimensions: B rows, T queries, S places of keys, N query heads, K key/value heads, P lists per query (K or N),
G = N / P query heads of a list, H head size, n picks, J = S / size blocks, C queries of a chunk, L tiles, R queries of
a tile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.dense import DIRECT, check_heads
from pallas_kernels.softmax import masked_attention
from pallas_kernels.tokens import MASKED

# C, the query rows R G of a tile, and about how many scores are computed together, so that they stay in the cache.
CHUNK = 4096
ROWS = 128
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
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention over the chosen blocks, scores scaled by 1/sqrt(H), in float32 or wider.

    picks: numbers of blocks of ``size`` places, each at most once, -1 for none; P is K where the heads of a group share
    them and N where every head has its own. A place is seen when its order is at most the query's; empty places have an
    order past all others.

    Returns (out in v's dtype, lse) as ``dense_attention``.
    """
    check_heads(q, k)
    if picks.shape[2] not in (k.shape[2], q.shape[2]):
        raise ValueError(f"picks for {picks.shape[2]} heads, expected {k.shape[2]} or {q.shape[2]}")
    if k.shape[1] <= DIRECT:
        return masked_attention(q, k, v, _mask(picks, q_order, k_order, size))
    return _selected(q, k, v, picks, q_order, k_order, size)


def _mask(picks, q_order, k_order, size: int) -> Bool[Array, "B P T S"]:
    """Which places every list lets a query see."""
    chosen = jnp.any(picks[..., None] == jnp.arange(k_order.shape[1] // size), axis=-2)
    chosen = jnp.repeat(chosen, size, axis=-1) & (k_order[:, None] <= q_order[..., None])[:, :, None]
    return chosen.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _selected(q, k, v, picks, q_order, k_order, size):
    return _forward(q, k, v, picks, q_order, k_order, size)[0]


def _forward(q, k, v, picks, q_order, k_order, size):
    wide, lists = jnp.promote_types(jnp.float32, q.dtype), picks.shape[2]

    group_size = max(1, SCORES // (ROWS * size))

    def chunk(keys, xs):
        (k, v, k_order), (q, picks, q_order) = keys, xs
        tiles = _tiles(picks, k.shape[0], _tile_queries(q), group_size)

        def group(tiles):
            scores = _scores(_gather(q, tiles), k, q_order, k_order, tiles)
            top = jnp.max(scores, axis=-1)
            weights = jnp.exp(scores - top[..., None])
            out = jnp.einsum("lrs,lsh->lrh", weights.astype(v.dtype), v[tiles.block], preferred_element_type=wide)
            return top, jnp.sum(weights, axis=-1), out

        top, sums, out = jax.lax.map(group, _groups(tiles, group_size))
        # every query's picks side by side: [C, n, G(, H)]
        top = _scatter(top, tiles, q, MASKED)
        best = jnp.max(top, axis=1, keepdims=True)
        share = jnp.where(top > MASKED / 2, jnp.exp(top - best), 0.0)
        total = jnp.sum(share * _scatter(sums, tiles, q, 0.0), axis=1)
        seen = total > 0
        total = jnp.where(seen, total, 1.0)
        share = jnp.where(seen[:, None], share / total[:, None], 0.0)
        out = jnp.sum(share[..., None] * _scatter(out, tiles, q, 0.0), axis=1)
        return keys, (out.astype(v.dtype), jnp.where(seen, jnp.log(total) + best[:, 0], -jnp.inf))

    queries = (_cut(q, lists), _cut(picks, lists)[:, :, :, :, 0], _cut_order(q_order))
    _, (out, lse) = _each_list(chunk, lambda keys: keys, queries, _keys(k, v, k_order, size))
    out, lse = _join(out, q.shape), _join(lse[..., None], (*q.shape[:3], 1))[..., 0]
    return (out, lse), (q, k, v, picks, q_order, k_order, out, lse)


def _backward(size, residuals, cotangents):
    q, k, v, picks, q_order, k_order, out, lse = residuals
    d_out, d_lse = cotangents
    wide, lists = jnp.promote_types(jnp.float32, q.dtype), picks.shape[2]
    scale = q.shape[-1] ** -0.5
    # gradient of a score: weight * (d_out . v - delta); a query without keys has weights exp(-inf)
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_lse
    lse = jnp.where(jnp.isfinite(lse), lse, -MASKED)

    group_size = max(1, SCORES // (ROWS * size))

    def chunk(carry, xs):
        (k, v, k_order, dk, dv), (q, picks, q_order, d_out, delta, lse) = carry, xs
        tiles = _tiles(picks, k.shape[0], _tile_queries(q), group_size)

        def group(sums, tiles):
            rows, d_rows = _gather(q, tiles), _gather(d_out, tiles)
            weights = jnp.exp(_scores(rows, k, q_order, k_order, tiles) - _gather(lse, tiles))
            d_weights = jnp.einsum("lrh,lsh->lrs", d_rows, v[tiles.block], preferred_element_type=wide)
            d_scores = (weights * (d_weights - _gather(delta, tiles)) * scale).astype(q.dtype)
            dq = jnp.einsum("lrs,lsh->lrh", d_scores, k[tiles.block], preferred_element_type=wide)
            dk = jnp.einsum("lrs,lrh->lsh", d_scores, rows, preferred_element_type=wide)
            dv = jnp.einsum("lrs,lrh->lsh", weights.astype(q.dtype), d_rows, preferred_element_type=wide)
            return tuple(x.at[tiles.block].add(y) for x, y in zip(sums, (dk, dv), strict=True)), dq

        (dk, dv), dq = jax.lax.scan(group, (dk, dv), _groups(tiles, group_size))
        return (k, v, k_order, dk, dv), jnp.sum(_scatter(dq, tiles, q, 0.0), axis=1)

    def start(keys):
        return (*keys, jnp.zeros(keys[0].shape, wide), jnp.zeros(keys[1].shape, wide))

    queries = (_cut(q, lists), _cut(picks, lists)[:, :, :, :, 0], _cut_order(q_order))
    queries += (_cut(d_out.astype(q.dtype), lists), _cut(delta[..., None], lists), _cut(lse[..., None], lists))
    carry, dq = _each_list(chunk, start, queries, _keys(k, v, k_order, size))
    dk, dv = (_join_keys(x, k.shape) for x in carry[3:])
    return _join(dq, q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_selected.defvjp(_forward, _backward)


# --- Tiles of the queries that chose a block -------------------------------------------------------------------------


class _Tiles(NamedTuple):
    """block [L]: the block of each tile, in rising order. query [L, R]: the query of each row, C for none. row [C, n]:
    where among the L R rows the query's pick is, L R for none.
    """

    block: jax.Array
    query: jax.Array
    row: jax.Array | None


def _tile_queries(q: jax.Array) -> int:
    """R for queries [C, G, H]."""
    return max(1, ROWS // q.shape[1])


def _tiles(picks: jax.Array, blocks: int, queries: int, group: int) -> _Tiles:
    """The tiles of picks [C, n], ``queries`` of each, a multiple of ``group``; static shapes hold any picks."""
    size, count = picks.size, min(picks.size, picks.size // queries + blocks)
    count = -(-count // group) * group
    flat = jnp.where(picks < 0, blocks, picks).reshape(-1)
    order = jnp.argsort(flat)
    chosen = flat[order]
    pairs = jnp.zeros(blocks, jnp.int32).at[flat].add(1, mode="drop")
    tiles = -(-pairs // queries)
    ends, first = jnp.cumsum(tiles), jnp.cumsum(pairs) - pairs
    rank = jnp.arange(size) - first.at[chosen].get(mode="clip")
    row = (ends - tiles).at[chosen].get(mode="clip") * queries + rank
    row = jnp.where(chosen < blocks, row, count * queries).astype(jnp.int32)
    query = jnp.full(count * queries, picks.shape[0]).at[row].set(order // picks.shape[1], mode="drop")
    block = jnp.searchsorted(ends, jnp.arange(count), side="right").clip(max=blocks - 1)
    return _Tiles(block, query.reshape(count, queries), jnp.zeros_like(row).at[order].set(row).reshape(picks.shape))


def _groups(tiles: _Tiles, size: int) -> _Tiles:
    """The tiles in groups of ``size``: block [L / size, size], query [L / size, size, R]."""
    return _Tiles(*(x.reshape(-1, size, *x.shape[1:]) for x in tiles[:2]), None)


def _gather(x: jax.Array, tiles: _Tiles) -> jax.Array:
    """[C, G, H] -> [L, R G, H], zeros in empty rows."""
    rows = x.at[tiles.query].get(mode="fill", fill_value=0)
    return rows.reshape(rows.shape[0], -1, x.shape[-1])


def _scatter(x: jax.Array, tiles: _Tiles, q: jax.Array, fill: float) -> jax.Array:
    """[groups, group, R G(, H)] -> [C, n, G(, H)]."""
    rows = x.reshape(tiles.query.size, q.shape[1], *x.shape[3:])
    return rows.at[tiles.row].get(mode="fill", fill_value=fill)


def _scores(rows, k, q_order, k_order, tiles: _Tiles):
    """Masked scores [L, R G, size] of rows [L, R G, H]."""
    wide = jnp.promote_types(jnp.float32, rows.dtype)
    scores = jnp.einsum("lrh,lsh->lrs", rows, k[tiles.block], preferred_element_type=wide) * rows.shape[-1] ** -0.5
    order = q_order.at[tiles.query].get(mode="fill", fill_value=-1)
    bias = jnp.where(k_order[tiles.block][:, None] <= order[..., None], 0.0, MASKED).astype(wide)
    grouped = scores.reshape(*order.shape, -1, scores.shape[-1]) + bias[:, :, None]
    return grouped.reshape(scores.shape)


# --- Rows, lists and chunks ------------------------------------------------------------------------------------------


def _each_list(chunk, start, queries, keys):
    """``chunk`` over the chunks of every list of every row: (its last carry, its results), [B, P, chunks, ...] each.

    queries: [B, P, chunks, ...] each but the order, [B, chunks, C]. keys: those of a key/value head, [B, K, ...] each
    but the order, [B, J, size]; ``start`` makes the carry of them.
    """
    q, picks, q_order, *others = queries
    k, v, k_order = keys
    lists, heads = q.shape[1], k.shape[1]

    def row(xs):
        (q, picks, q_order, *others), (k, v, k_order) = xs

        def one(at):
            head = at * heads // lists
            mine = (q[at], picks[at], q_order, *(x[at] for x in others))
            carry, results = jax.lax.scan(chunk, start((k[head], v[head], k_order)), mine)
            return carry, results

        return jax.lax.map(one, jnp.arange(lists))

    return jax.lax.map(row, ((q, picks, q_order, *others), (k, v, k_order)))


def _cut(x: jax.Array, lists: int) -> jax.Array:
    """[B, T, N, H] -> [B, P, chunks, C, G, H], filled up: with queries that see nothing, and picks of block 0."""
    size = min(CHUNK, x.shape[1])
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], -1, size, lists, x.shape[2] // lists, x.shape[3])
    return x.transpose(0, 3, 1, 2, 4, 5)


def _cut_order(order: jax.Array) -> jax.Array:
    """[B, T] -> [B, chunks, C]; what is filled up comes before every key."""
    size = min(CHUNK, order.shape[1])
    order = jnp.pad(order, ((0, 0), (0, -order.shape[1] % size)), constant_values=-1)
    return order.reshape(order.shape[0], -1, size)


def _join(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[B, P, chunks, C, G, H] -> [B, T, N, H]."""
    x = x.transpose(0, 2, 3, 1, 4, 5)
    return x.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]


def _keys(k, v, k_order, size):
    """(k, v [B, K, J, size, H], order [B, J, size])."""
    k, v = (x.reshape(x.shape[0], -1, size, *x.shape[2:]).transpose(0, 3, 1, 2, 4) for x in (k, v))
    return k, v, k_order.reshape(k_order.shape[0], -1, size)


def _join_keys(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[B, P, J, size, H] -> [B, S, K, H], summed over the lists of a key/value head."""
    x = x.reshape(x.shape[0], shape[2], -1, *x.shape[2:]).sum(axis=2)
    return x.transpose(0, 2, 3, 1, 4).reshape(shape)
