"""The inverse index of chosen blocks: which queries chose a block, in tiles that products can work
on.

Of a chunk of queries with the same list heads, those that chose a block are gathered into tiles of
R queries with all G heads of the list, so that small groups fill the products too and a block is
read once per tile; every query then merges what its tiles found.

Dimensions: B rows, T queries, S places of keys, N query heads, K key/value heads, P lists per query
(K or N), G = N / P query heads of a list, H head size, n picks, J blocks, C queries of a chunk, L
tiles, R queries of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.padding import pad
from pallas_kernels.tokens import MASKED


class Tiles(NamedTuple):
    """Which queries of a chunk attend to which block, in tiles of one block each."""

    # int32 [L]: the block of each tile, in rising order, so that a block's tiles follow each other.
    block: jax.Array
    # int32 [L, R]: the query of each row of a tile, C for none.
    query: jax.Array
    # int32 [C, n]: where among the L R rows each pick of a query is, L R for none.
    row: jax.Array
    # int32 [J + 1]: the tiles of block j are starts[j] to starts[j + 1]; those from starts[J] on
    # hold nothing.
    starts: jax.Array


def tile_queries(rows: int, groups: int) -> int:
    """R, for tiles of at most so many rows of R G."""
    return max(1, rows // groups)


def tile_count(picks: int, blocks: int, queries: int, multiple: int = 1) -> int:
    """L that holds any choice of so many picks of a chunk, ``queries`` to a tile.

    At most every block has one tile that is not full, and never are there more tiles than picks.
    """
    return -(-min(picks, picks // queries + blocks) // multiple) * multiple


def tiles(picks: jax.Array, blocks: int, queries: int, multiple: int = 1) -> Tiles:
    """The tiles of picks [C, n], -1 for none, ``queries`` of each, a multiple of them; static
    shapes hold any picks.
    """
    count = tile_count(picks.size, blocks, queries, multiple)
    flat = jnp.where(picks < 0, blocks, picks).reshape(-1)
    # A counting sort: picks in the order of their blocks. A pick's row is then where the tiles of
    # its block begin, and its rank among the picks of that block.
    order = jnp.argsort(flat)
    chosen = flat[order]
    # picks of each block, the tiles that they need, and where the block's tiles end
    pairs = jnp.zeros(blocks, jnp.int32).at[flat].add(1, mode="drop")
    needed = -(-pairs // queries)
    ends = jnp.cumsum(needed, dtype=jnp.int32)
    first = jnp.cumsum(pairs) - pairs
    rank = jnp.arange(picks.size) - first.at[chosen].get(mode="clip")
    row = (ends - needed).at[chosen].get(mode="clip") * queries + rank
    row = jnp.where(chosen < blocks, row, count * queries).astype(jnp.int32)  # -1 picked nothing
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


def gather(x: jax.Array, query: jax.Array) -> jax.Array:
    """[C, G, H] -> [L, R G, H] of the queries [L, R] of tiles, zeros in empty rows."""
    rows = x.at[query].get(mode="fill", fill_value=0)
    return rows.reshape(rows.shape[0], -1, x.shape[-1])


def gather_order(order: jax.Array, query: jax.Array) -> jax.Array:
    """[C] -> [L, R]; an empty row comes before every key."""
    return order.at[query].get(mode="fill", fill_value=-1)


def scatter(x: jax.Array, tiles: Tiles, groups: int, fill: float) -> jax.Array:
    """[L, R G(, H)] -> [C, n, G(, H)], every query's picks side by side."""
    rows = x.reshape(tiles.query.size, groups, *x.shape[2:])
    return rows.at[tiles.row].get(mode="fill", fill_value=fill)


def merge(
    out: jax.Array, lse: jax.Array, tiles: Tiles, groups: int, dtype
) -> tuple[jax.Array, jax.Array]:
    """(out [C, G, H], lse [C, G]) of every query over all its picks, 0 and -inf where it sees
    nothing.

    out [L, R G, H], lse [L, R G]: of every tile's rows over its block; MASKED, or about it, where a
    row sees nothing.
    """
    lse = scatter(lse, tiles, groups, MASKED)
    best = jnp.max(lse, axis=1, keepdims=True)
    share = jnp.where(lse > MASKED / 2, jnp.exp(lse - best), 0.0)
    total = jnp.sum(share, axis=1)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    share = jnp.where(seen[:, None], share / total[:, None], 0.0)
    out = jnp.sum(share[..., None] * scatter(out, tiles, groups, 0.0), axis=1)
    return out.astype(dtype), jnp.where(seen, jnp.log(total) + best[:, 0], -jnp.inf)


# --- Rows, lists and chunks -----------------------------------------------------------------------


def cut(x: jax.Array, lists: int, chunk: int) -> jax.Array:
    """[B, T, N, H] -> [B, P, chunks, C, G, H], filled up: with queries that see nothing, and picks
    of block 0.
    """
    x = pad(x, chunk)
    x = x.reshape(x.shape[0], -1, chunk, lists, x.shape[2] // lists, x.shape[3])
    return x.transpose(0, 3, 1, 2, 4, 5)


def cut_picks(picks: jax.Array, chunk: int) -> jax.Array:
    """[B, T, P, n] -> [B, P, chunks, C, n]; what is filled up chooses nothing."""
    return cut(picks + 1, picks.shape[2], chunk)[:, :, :, :, 0] - 1


def cut_order(order: jax.Array, chunk: int) -> jax.Array:
    """[B, T] -> [B, chunks, C]; what is filled up comes before every key."""
    size = -order.shape[1] % chunk
    return jnp.pad(order, ((0, 0), (0, size)), constant_values=-1).reshape(
        order.shape[0], -1, chunk
    )


def join(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[B, P, chunks, C, G, H] -> [B, T, N, H]."""
    x = x.transpose(0, 2, 3, 1, 4, 5)
    return x.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]


def cut_keys(
    k: jax.Array, v: jax.Array, k_order: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(k, v [B, K, J, size, H], order [B, J, size])."""
    k, v = (x.reshape(x.shape[0], -1, size, *x.shape[2:]).transpose(0, 3, 1, 2, 4) for x in (k, v))
    return k, v, k_order.reshape(k_order.shape[0], -1, size)


def join_keys(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[B, P, J, size, H] -> [B, S, K, H], summed over the lists of a key/value head."""
    x = x.reshape(x.shape[0], shape[2], -1, *x.shape[2:]).sum(axis=2)
    return x.transpose(0, 2, 3, 1, 4).reshape(shape)
