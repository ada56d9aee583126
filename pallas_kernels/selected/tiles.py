"""The inverse index of chosen blocks: which queries chose a block, in tiles of queries.

Every query has a list of the blocks that it chose. The index turns the lists round. Of a chunk of
queries, those that chose a block are gathered into tiles of R queries, each with all G heads of the
list. A tile attends to its one block. Its R G rows fill a matrix product even where G is small, and
the block is read once for the whole tile. Every query then merges what its tiles found.

Dimensions: B rows, T queries, S places of keys, N query heads, K key/value heads, P lists per query
(K or N), G = N / P query heads of a list, H head size, n picks, J blocks, C queries of a chunk, L
tiles, R queries of a tile, U spans of tiles, S tiles of a span.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.padding import pad
from pallas_kernels.tokens import MASKED


class Tiles(NamedTuple):
    """The queries of a chunk that attend to each block, in tiles of one block each."""

    # int32 [L]: the block of each tile, in rising order, so that a block's tiles follow each other.
    block: jax.Array
    # int32 [L, R]: the query in each place of a tile; C where the place is empty.
    query: jax.Array
    # int32 [C, n]: the place of each pick of a query among the L R places; L R where there is no
    # pick.
    row: jax.Array
    # int32 [J + 1]: block j has the tiles from starts[j] to before starts[j + 1]. The tiles from
    # starts[J] on are empty.
    starts: jax.Array


def tile_queries(rows: int, groups: int) -> int:
    """R, the queries of a tile that has at most ``rows`` rows; a query takes ``groups`` rows, G."""
    return max(1, rows // groups)


def tile_count(picks: int, blocks: int, queries: int, multiple: int = 1) -> int:
    """L, the number of tiles that is enough for any choice of ``picks`` picks by a chunk.

    queries: R. multiple: the result is rounded up to a multiple of it.
    """
    # Each block has at most one tile that is not full. A tile in use holds at least one pick.
    return -(-min(picks, picks // queries + blocks) // multiple) * multiple


def tiles(picks: jax.Array, blocks: int, queries: int, multiple: int = 1) -> Tiles:
    """The tiles of picks [C, n], the numbers of the chosen blocks, -1 for none.

    queries: R. The number of tiles, a multiple of ``multiple``, does not depend on the picks.
    """
    count = tile_count(picks.size, blocks, queries, multiple)
    flat = jnp.where(picks < 0, blocks, picks).reshape(-1)
    # Sort the picks by their blocks; those that are none come last, as block ``blocks``. The place
    # of a pick is where the tiles of its block begin, plus its rank among the picks of that block.
    order = jnp.argsort(flat)
    chosen = flat[order]
    # For each block: the number of its picks (index ``blocks`` is out of range and dropped), the
    # tiles that they need, and where its tiles end.
    pairs = jnp.zeros(blocks, jnp.int32).at[flat].add(1, mode="drop")
    needed = -(-pairs // queries)
    ends = jnp.cumsum(needed, dtype=jnp.int32)
    # where the picks of each block begin in the sorted order
    first = jnp.cumsum(pairs) - pairs
    rank = jnp.arange(picks.size) - first.at[chosen].get(mode="clip")
    row = (ends - needed).at[chosen].get(mode="clip") * queries + rank
    row = jnp.where(chosen < blocks, row, count * queries).astype(jnp.int32)  # -1 picked nothing
    # ``order`` counts the C n picks, so that // n is the query
    query = (
        jnp.full(count * queries, picks.shape[0]).at[row].set(order // picks.shape[1], mode="drop")
    )
    # tiles past the last needed one get the last block and no queries
    block = (
        jnp.searchsorted(ends, jnp.arange(count), side="right")
        .clip(max=blocks - 1)
        .astype(jnp.int32)
    )
    # from the order of blocks back to the order of queries
    row = jnp.zeros_like(row).at[order].set(row).reshape(picks.shape)
    return Tiles(
        block, query.reshape(count, queries), row, jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    )


class Spans(NamedTuple):
    """The tiles of all blocks cut into spans: at most S consecutive tiles of one block each.

    One thread block sums the gradients of keys over one span, so that a block which every query
    chose (the first one, under NSA) keeps many of them busy.
    """

    # int32 [U]: the block of each span, in rising order.
    block: jax.Array
    # int32 [U] each: the span has the tiles from ``first`` to before ``last``.
    first: jax.Array
    last: jax.Array
    # int32 [J + 1]: block j has the spans from starts[j] to before starts[j + 1]. The spans from
    # starts[J] on are empty.
    starts: jax.Array


def span_count(count: int, blocks: int, most: int) -> int:
    """U, the number of spans that is enough for any ``count`` tiles. most: S."""
    # each block has at most one span that is not full
    return min(count, count // most + blocks)


def spans(starts: jax.Array, count: int, most: int) -> Spans:
    """The spans of ``count`` tiles, of which block j has starts[j] to before starts[j + 1].

    most: S. The number of spans does not depend on the tiles.
    """
    blocks = starts.shape[0] - 1
    needed = -(-(starts[1:] - starts[:-1]) // most)
    ends = jnp.cumsum(needed, dtype=jnp.int32)
    number = jnp.arange(span_count(count, blocks, most), dtype=jnp.int32)
    # spans past the last needed one get the last block
    block = jnp.searchsorted(ends, number, side="right").clip(max=blocks - 1).astype(jnp.int32)
    within = number - (ends - needed)[block]
    first = starts[block] + within * most
    last = jnp.minimum(first + most, starts[block + 1])
    used = number < ends[-1]
    return Spans(
        block,
        jnp.where(used, first, 0),
        jnp.where(used, last, 0),
        jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
    )


def gather(x: jax.Array, query: jax.Array) -> jax.Array:
    """The rows of tiles: x [C, G, H] at queries [L, R] -> [L, R G, H], zeros in empty places."""
    rows = x.at[query].get(mode="fill", fill_value=0)
    return rows.reshape(rows.shape[0], -1, x.shape[-1])


def gather_order(order: jax.Array, query: jax.Array) -> jax.Array:
    """The order of each query of tiles, [C] -> [L, R].

    An empty place gets -1. That comes before every key, so that it sees none.
    """
    return order.at[query].get(mode="fill", fill_value=-1)


def scatter(x: jax.Array, tiles: Tiles, groups: int, fill: float) -> jax.Array:
    """The inverse of ``gather``: [L, R G(, H)] -> [C, n, G(, H)], every query's picks side by side.

    fill: for picks that are none.
    """
    rows = x.reshape(tiles.query.size, groups, *x.shape[2:])
    return rows.at[tiles.row].get(mode="fill", fill_value=fill)


def merge(
    out: jax.Array, lse: jax.Array, tiles: Tiles, groups: int, dtype
) -> tuple[jax.Array, jax.Array]:
    """(out [C, G, H], lse [C, G]) of every query over all its picks.

    out [L, R G, H], lse [L, R G]: the results of each tile's rows over its block. The lse of a row
    that sees nothing is about MASKED. A query that sees nothing gets out 0 and lse -inf.
    """
    lse = scatter(lse, tiles, groups, MASKED)
    # each pick's share of the softmax over the union, relative to the largest for the sake of exp
    best = jnp.max(lse, axis=1, keepdims=True)
    # a NaN must stay visible, and not count as a pick that sees nothing
    share = jnp.where(lse <= MASKED / 2, 0.0, jnp.exp(lse - best))
    total = jnp.sum(share, axis=1)
    seen = total != 0
    total = jnp.where(seen, total, 1.0)
    share = jnp.where(seen[:, None], share / total[:, None], 0.0)
    out = jnp.sum(share[..., None] * scatter(out, tiles, groups, 0.0), axis=1)
    return out.astype(dtype), jnp.where(seen, jnp.log(total) + best[:, 0], -jnp.inf)


# --- Rows, lists and chunks -----------------------------------------------------------------------


def cut(x: jax.Array, lists: int, chunk: int) -> jax.Array:
    """[B, T, N, H] -> [B, P, chunks, C, G, H], filled up to whole chunks with zeros."""
    x = pad(x, chunk)
    x = x.reshape(x.shape[0], -1, chunk, lists, x.shape[2] // lists, x.shape[3])
    return x.transpose(0, 3, 1, 2, 4, 5)


def cut_picks(picks: jax.Array, chunk: int) -> jax.Array:
    """[B, T, P, n] -> [B, P, chunks, C, n]; queries that fill up the last chunk choose nothing."""
    # ``cut`` fills up with 0, which + 1 and - 1 around it turn into -1, no block
    return cut(picks + 1, picks.shape[2], chunk)[:, :, :, :, 0] - 1


def cut_order(order: jax.Array, chunk: int) -> jax.Array:
    """[B, T] -> [B, chunks, C]; queries that fill up the last chunk come before every key."""
    size = -order.shape[1] % chunk
    return jnp.pad(order, ((0, 0), (0, size)), constant_values=-1).reshape(
        order.shape[0], -1, chunk
    )


def join(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of ``cut``: [B, P, chunks, C, G, H] -> [B, T, N, H], the shape given."""
    x = x.transpose(0, 2, 3, 1, 4, 5)
    return x.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]


def cut_keys(
    k: jax.Array, v: jax.Array, k_order: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys, values and their order in blocks: (k, v [B, K, J, size, H], order [B, J, size])."""
    k, v = (x.reshape(x.shape[0], -1, size, *x.shape[2:]).transpose(0, 3, 1, 2, 4) for x in (k, v))
    return k, v, k_order.reshape(k_order.shape[0], -1, size)


def join_keys(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[B, P, J, size, H] -> [B, S, K, H], the shape given, summed over each head's lists."""
    x = x.reshape(x.shape[0], shape[2], -1, *x.shape[2:]).sum(axis=2)
    return x.transpose(0, 2, 3, 1, 4).reshape(shape)
