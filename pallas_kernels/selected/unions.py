"""The blocks that a tile of neighbouring queries goes through: the union of what its queries chose.

Neighbours often choose the same blocks. A tile of R consecutive queries with all G heads of their
list then reads each block of the union once, and needs no copies of its queries for every pick.
Queries that did not choose a block of the union are masked: a number of R bits says who chose it.

Whether this is faster than an index of the queries of each block (``tiles``) depends on the size
of the unions. ``plan`` says up to which size, on average over the tiles of a chunk. Where a chunk
has larger ones, the index serves, with the same results.

Dimensions: E lists of all rows, L tiles, R queries of a tile, G query heads of a list, n picks, J
blocks, H head size, S steps of a list, W blocks of a step.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.padding import pad
from pallas_kernels.selected.tuning import TuningConfig

# Most queries of a tile: one bit each of a number of 32 bits.
MAX_QUERIES = 32
# Fewest rows (queries times heads) of a tile: full lanes of the scores.
MIN_ROWS = 128
# Numbers of a chunk's steps that fit the scalar memory beside what the compiler keeps there.
MAX_NUMBERS = 2**17
# Operations of products in the time in which memory brings a byte, and bytes in the time that a
# grid step takes by itself, 0.35 us. Both are a v5p's, at 60 % of its peak: of v5e, v5p and v6e the
# one whose arithmetic is the slowest beside its memory, and whose steps cost the most bytes.
FLOPS_PER_BYTE = 100
STEP_BYTES = 2**20
# How often the index moves a row of queries: it is read, written to a tile and read again, and its
# result is written and read again.
INDEX_MOVES = 5


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cut of the queries of a chunk into tiles, and how many blocks these may go through."""

    # R.
    queries: int
    # L.
    tiles: int
    # W.
    width: int
    # S, room for the steps of all tiles of a list.
    steps: int
    # Whether there is room for any choice of blocks.
    always: bool


class Visits(NamedTuple):
    """The steps of a list, each of which brings W blocks to one tile."""

    # int32 [S]: the tile of each step, in rising order. Every tile has at least one step.
    tile: jax.Array
    # int32 [S W]: the blocks of each step, side by side.
    block: jax.Array
    # int32 [S W]: bit r says whether query r of the tile chose the block; 0 in places of a step
    # that are left over.
    chosen: jax.Array
    # int32: how many steps the tiles need. If it is more than S, the other arrays mean nothing.
    used: jax.Array


def plan(
    chunk: int,
    lists: int,
    picks: int,
    blocks: int,
    groups: int,
    size: int,
    head_dim: int,
    itemsize: int,
    tuning: TuningConfig,
) -> Plan | None:
    """The tiles of a chunk of queries, or None where the index is faster for any choice.

    lists: E. picks: n. blocks: J, of ``size`` places. groups: G. itemsize: bytes of an element.
    """
    queries = min(MAX_QUERIES, tuning.rows // groups, chunk)
    if not tuning.by_tile or queries * groups < MIN_ROWS:
        return None
    tiles = -(-chunk // queries)
    largest = min(queries * picks, blocks)
    width = max(1, min(tuning.keys // size, largest))
    # what a tile costs, in bytes of memory: the index by picks, and a union by blocks
    row = groups * head_dim * itemsize
    by_index = queries * picks * (INDEX_MOVES * row + STEP_BYTES * groups // tuning.rows)
    flops = 4 * size * queries * groups * head_dim
    by_block = max(2 * size * head_dim * itemsize, flops // FLOPS_PER_BYTE) + STEP_BYTES // width
    most = -(-largest // width)
    steps = min(most, by_index // by_block // width) * tiles
    steps = min(steps, MAX_NUMBERS // (lists * (1 + 2 * width)))
    return Plan(queries, tiles, width, steps, steps == most * tiles) if steps >= tiles else None


def visits(picks: jax.Array, plan: Plan) -> Visits:
    """The steps of picks [C, n] of one list, the numbers of the chosen blocks, -1 for none."""
    count = picks.shape[1]
    filling = plan.tiles * plan.queries - picks.shape[0]
    flat = jnp.pad(picks, ((0, filling), (0, 0)), constant_values=-1)
    flat = flat.reshape(plan.tiles, -1)
    query = jnp.arange(plan.queries * count, dtype=jnp.int32) // count
    # Sort the picks of a tile by their blocks, those that are none last, with the query in the low
    # bits. A block's first pick begins its place in the union.
    none = jnp.iinfo(jnp.int32).max
    pairs = jnp.sort(jnp.where(flat < 0, none, flat * MAX_QUERIES + query), axis=1)
    real = pairs < none
    block = jnp.where(real, pairs // MAX_QUERIES, -1)
    first = real & (block != jnp.pad(block, ((0, 0), (1, 0)), constant_values=-1)[:, :-1])
    found = jnp.sum(real, axis=1, keepdims=True, dtype=jnp.int32)
    place = jnp.arange(pairs.shape[1], dtype=jnp.int32)
    begin = jnp.sort(jnp.where(first, place, found), axis=1)
    end = jnp.concatenate([begin[:, 1:], found], axis=1)
    # The bits of a block's queries differ, so that their sum has them all. Sums up to each pick
    # overflow, but the difference of two of them is exact modulo 2^32.
    bits = jnp.where(real, jnp.uint32(1) << (pairs % MAX_QUERIES).astype(jnp.uint32), 0)
    sums = jnp.pad(jnp.cumsum(bits, axis=1, dtype=jnp.uint32), ((0, 0), (1, 0)))
    chosen = jnp.take_along_axis(sums, end, axis=1) - jnp.take_along_axis(sums, begin, axis=1)
    union = jnp.take_along_axis(block, jnp.minimum(begin, block.shape[1] - 1), axis=1)
    return _steps(jnp.maximum(union, 0), chosen.astype(jnp.int32), first.sum(axis=1), plan)


def _steps(union: jax.Array, chosen: jax.Array, count: jax.Array, plan: Plan) -> Visits:
    """The steps of tiles with so many blocks: union, chosen [L, R n], and count [L]."""
    needed = jnp.maximum(1, -(-count // plan.width))
    ends = jnp.cumsum(needed, dtype=jnp.int32)
    step = jnp.arange(plan.steps, dtype=jnp.int32)
    tile = jnp.searchsorted(ends, step, side="right").clip(max=plan.tiles - 1).astype(jnp.int32)
    within = (step - (ends - needed)[tile])[:, None] * plan.width + jnp.arange(plan.width)
    # a place past the last block has that block again, which nobody chose there
    at = jnp.minimum(within, jnp.maximum(count[tile, None] - 1, 0))
    block = union[tile[:, None], at]
    chosen = jnp.where(within < count[tile, None], chosen[tile[:, None], at], 0)
    flat = (x.reshape(-1).astype(jnp.int32) for x in (block, chosen))
    return Visits(tile, *flat, ends[-1])


def tile_rows(x: jax.Array, plan: Plan) -> jax.Array:
    """The rows of tiles: [E, C, G, H] -> [E, L, R G, H], zeros where the last tile is not full."""
    x = pad(x, plan.queries)
    return x.reshape(x.shape[0], plan.tiles, -1, x.shape[3])


def tile_order(order: jax.Array, lists: int, groups: int, plan: Plan) -> jax.Array:
    """The order of every row of tiles: [B, C] -> [E, L, R G]; -1 in places that are left over."""
    filling = plan.tiles * plan.queries - order.shape[1]
    order = jnp.pad(order, ((0, 0), (0, filling)), constant_values=-1)
    order = jnp.repeat(jnp.repeat(order, lists // order.shape[0], axis=0), groups, axis=1)
    return order.reshape(lists, plan.tiles, -1)


def from_tiles(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of ``tile_rows``: [E, L, R G, H] -> [E, C, G, H], the shape given."""
    return x.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]
