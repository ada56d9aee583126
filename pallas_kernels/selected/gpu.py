"""Attention over chosen blocks on GPU (Mosaic GPU), in tiles of 128 query rows.

Forward, and for the gradient of queries, a thread block goes through consecutive tiles. For each
tile it goes through its block in parts of 64 keys. The rows of a tile are copied again for every
part, and the keys of a block for every tile, but they are then still in the L2 cache.

The gradients of keys and values are in ``gpu_keys``.

One more warpgroup copies ahead into a ring of buffers in shared memory. ``matrix_units`` multiplies
on Hopper and on Blackwell.

Where G is 8, 16, 32 or 64 the kernel gathers the queries itself: the G rows of a query's list lie
together, so that 128 / G copies fill a tile. For other G, XLA gathers the rows into tiles, because
a copy must fill whole rows of eight of the layout of shared memory. (Filling 4 rows up to 8 would
write twice the results, which costs what it saves.) In bytes, forward, for 65,536 tokens with 64
query and 4 key/value heads of 128 in bfloat16 and 16 blocks of 64, where one row for each head,
query and pick is 17 GB:

- XLA gathers: about 91 GB of memory, 27 ms at 3.35 TB/s.
- The kernel gathers: 51 GB, 15 ms. Queries are read, results written, and read again to be merged.
- A thread block for each query that loads its blocks (as published kernels do) would read 2 GB from
  memory but 137 GB from the L2 cache: 25 ms at an assumed 5.5 TB/s, and more once the keys of a
  head do not fit the cache (past 100,000 tokens).

For each pick a gather moves 768 G bytes of memory, and a thread block per query 32 KB of the cache,
at any length: it would be faster from about G = 26 on, which no model here has.

Backward, for the same input, the kernels that gather move about 137 GB, 41 ms (XLA would move 275
GB, 82 ms). 34 GB of them are for the gradients of keys and values. 103 GB are for those of queries:
each pick's part is written in float32 and read again. There a thread block for each query would be
faster from about G = 13 on (25 ms instead of 31 here). It is not built.

Dense attention at 600 TFLOP/s takes 117 ms forward and 293 ms backward here: 7.6 and 7.1 times as
long. Both take the same time at about 8,600 tokens forward and 9,200 backward. All of this is
arithmetic; nothing was timed.

Head sizes are padded to a multiple of 64, and tiles to 128 rows.

Dimensions: E lists of all rows, L tiles, R G rows of a tile, J blocks, H head size.
"""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash.gpu import LOG2_E
from pallas_kernels.matrix_units import UNITS, full, spread, tiles
from pallas_kernels.pipeline import barriers, fetch, named, specialise_warps, visits
from pallas_kernels.selected import gpu_keys
from pallas_kernels.selected.gpu_memory import (
    PART,
    ROWS,
    SHARE,
    KernelSizes,
    flat_keys,
    key_rings,
    key_sources,
    launch,
    load,
    make_plan,
    row_arrays,
    row_copies,
    row_copy_count,
    row_rings,
    tile_at,
    tile_shape,
    tiled,
)
from pallas_kernels.selected.tuning import TuningConfig
from pallas_kernels.tokens import MASKED

DTYPES = ("bfloat16",)
# The devices that the kernels are written for.
TARGETS = ("h100", "h200", "gb200")
ELSEWHERE = "no kernel for this GPU"
# Sums the gradients of keys and values over spans of a block's tiles.
SPANS = gpu_keys


def obstacle(q_shape: tuple[int, ...], lists: int, size: int, tiles: int) -> str | None:
    """Reason why the kernels cannot run q [B, T, N, H] with these numbers of lists and tiles
    and this size of blocks, or None.
    """
    if q_shape[2] > lists * ROWS:
        return f"{q_shape[2] // lists} query heads share a list, more than {ROWS}"
    if size % PART:
        return f"{size=} must be a multiple of {PART}"
    if q_shape[3] > 128:
        return f"head size {q_shape[3]} is more than 128"
    return (
        None
        if tiles * ROWS < 2**31
        else f"{tiles} tiles at a time are more than {2**31 // ROWS - 1}"
    )


def tile_rows(tuning: TuningConfig, mean: int) -> int:
    """Most rows of a tile. mean: rows that choose a block on average, of no account on GPU."""
    return ROWS


def gathers(queries: int, groups: int, tuning: TuningConfig) -> bool:
    """True if the kernels copy the rows of each query themselves, for tiles of ``queries`` queries
    with ``groups`` heads.

    A copy fills whole rows of eight of shared memory's layout, and the tile is full.
    """
    return (
        tuning.gather_in_kernel
        and groups % 8 == 0
        and SHARE % groups == 0
        and queries * groups == ROWS
    )


def forward(
    rows: jax.Array,
    order: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_order: jax.Array,
    block: jax.Array,
    starts: jax.Array,
    *,
    query: jax.Array | None = None,
    tuning: TuningConfig,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the rows of each tile to the block of the tile.

    rows: [E, L, R G, H]. order: int32 [E, L, R G]. query: None, or the queries of each tile, int32
    [E, L, R], where the kernel gathers rows (``gathers``). Then rows are queries [E, C, G, H], and
    order is theirs, [B, C]; a query from C on is none. k, v: [B, K, J, size, H]. k_order: int32
    [B, J, size]. block: int32 [E, L], and starts: int32 [E, J + 1], as in ``Tiles``.

    Returns (out [E, L, R G, H] in v's dtype, lse float32 [E, L, R G]). The lse of a row that sees
    nothing is about MASKED. Tiles from starts[J] on are not written.
    """
    plan = make_plan(rows, k, query, tuning, interpret)
    unit = UNITS[plan.unit]
    arrays = row_arrays(query, (rows, order), unit.tile, unit, plan)
    copies = row_copy_count(2, unit.tile, unit, plan)
    shape = tile_shape(rows, plan)
    total = plan.lists * plan.tiles * ROWS
    out, lse = plgpu.kernel(
        functools.partial(_forward_kernel, plan=plan),
        kernel_name="selected_forward",
        out_type=[
            jax.ShapeDtypeStruct((total, plan.lanes), v.dtype),
            jax.ShapeDtypeStruct((total,), jnp.float32),
        ],
        scratch_types=[
            tiles((unit.compute, plan.steps, unit.tile, plan.lanes), rows.dtype),
            plgpu.SMEM((plan.steps, unit.compute, unit.tile), jnp.int32),
            *key_rings(plan, k.dtype),
            # copies of a step: the rows and their order, keys, values and their order
            *barriers(plan.steps, unit.compute, arrays=copies + 3),
            *unit.scratch(PART, plan.lanes, 1, v.dtype),
        ],
        **launch(plan, -(-plan.tiles // plan.span), interpret),
    )(block, starts, *arrays, *flat_keys(k, v, k_order))
    return tiled(out, shape), tiled(lse[:, None], (*shape[:3], 1))[..., 0]


def backward_q(
    rows, d_rows, sums, order, k, v, k_order, block, starts, *, query=None, tuning, interpret=False
) -> jax.Array:
    """The gradient of every tile's rows, float32 [E, L, R G, H].

    d_rows: [E, L, R G, H], the cotangents of the rows. sums: float32 [E, L, 2, R G], lse and delta.
    Where the kernel gathers they are [E, C, G, H] and [E, C, 2, G]. The other arguments are those
    of ``forward``.
    """
    plan = make_plan(rows, k, query, tuning, interpret)
    unit = UNITS[plan.unit]
    dtype = k.dtype
    arrays = row_arrays(query, (rows, d_rows, sums, order), unit.tile, unit, plan)
    copies = row_copy_count(4, unit.tile, unit, plan)
    dq = plgpu.kernel(
        functools.partial(_backward_q_kernel, plan=plan),
        kernel_name="selected_backward_q",
        out_type=jax.ShapeDtypeStruct((plan.lists * plan.tiles * ROWS, plan.lanes), jnp.float32),
        scratch_types=[
            *row_rings(plan, unit.tile, dtype),
            *key_rings(plan, dtype),
            *barriers(plan.steps, unit.compute, arrays=copies + 3),
            *unit.scratch(PART, plan.lanes, 1, dtype),
        ],
        **launch(plan, -(-plan.tiles // plan.span), interpret),
    )(block, starts, *arrays, *flat_keys(k, v, k_order))
    return tiled(dq, tile_shape(rows, plan))


# --- Kernels --------------------------------------------------------------------------------------


# The memory of ``_forward_kernel``.
_ForwardRefs = collections.namedtuple(
    "_ForwardRefs",
    # In HBM: the block of each tile, and the tiles of each block; the queries of each tile.
    "block starts query "
    # In HBM: queries and their order, keys, values and their order.
    "rows order k v k_order "
    # In HBM: the results.
    "out lse "
    # In shared memory: a ring for each of these five.
    "row_ring order_ring k_ring v_ring k_order_ring "
    # Barriers of the slots of the rings.
    "filled emptied",
)


def _forward_kernel(*arguments, plan):
    refs, scratch = named(_ForwardRefs, arguments)
    wg = jax.lax.axis_index("wg")
    unit = UNITS[plan.unit](scratch, plan.lanes, plan.interpret)
    first, count = _span(refs.starts, plan)
    parts = plan.size // PART

    def visit(slot, carry):
        top, total, acc = carry
        scores = unit.product(
            refs.row_ring.at[wg].at[slot], refs.k_ring.at[slot].transpose((1, 0))
        ) * (plan.scale * LOG2_E)
        scores = _mask(scores, refs.order_ring.at[slot, wg], refs.k_order_ring.at[slot], unit)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - spread(new_top, scores.shape, 0))
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + weights.sum(axis=1)
        return (
            new_top,
            total,
            unit.shrink_and_add(
                acc, shrink, weights.astype(refs.v_ring.dtype), refs.v_ring.at[slot]
            ),
        )

    def compute():
        @pl.loop(0, count)
        def _(tile):
            column = unit.layout.reduce(1)
            # above MASKED, so that a masked score weighs nothing even before a visible key was met
            start = (
                full((unit.tile,), MASKED / 2, column),
                full((unit.tile,), 0, column),
                unit.zero(0),
            )
            # steps count through the parts of all tiles, so that the copies run on from one tile to
            # the next
            top, total, acc = visits(
                tile * parts,
                (tile + 1) * parts,
                refs.filled,
                refs.emptied,
                visit,
                start,
                plan.steps,
            )
            nothing = total == 0.0
            divisor = jnp.where(nothing, 1.0, total)
            acc = unit.value(acc, 0)
            own = pl.ds(tile_at(first + tile, plan) * ROWS + wg * unit.tile, unit.tile)
            refs.out.at[own][...] = (acc / spread(divisor, acc.shape, 0)).astype(refs.out.dtype)
            refs.lse.at[own][...] = jnp.where(
                nothing, MASKED, (top + jnp.log2(divisor)) * (1 / LOG2_E)
            )

    def sources(step):
        tile = first + jax.lax.div(step, jnp.int32(parts))
        keys = key_sources(
            refs.block,
            tile,
            jax.lax.rem(step, jnp.int32(parts)),
            refs.k,
            refs.v,
            refs.k_order,
            plan,
        )
        return (*row_sources(tile), *keys)

    row_sources, slots = row_copies(
        refs.query, (refs.rows, refs.order), (refs.row_ring, refs.order_ring), unit.tile, unit, plan
    )
    rings = (*slots, refs.k_ring, refs.v_ring, refs.k_order_ring)
    specialise_warps(
        wg,
        unit,
        compute,
        lambda: fetch(count * parts, sources, rings, refs.filled, refs.emptied, plan.steps),
    )


# The memory of ``_backward_q_kernel``, as of ``_ForwardRefs``.
_BackwardQRefs = collections.namedtuple(
    "_BackwardQRefs",
    "block starts query rows "
    # Cotangents of the rows' results, and their lse and delta.
    "d_rows sums order k v k_order "
    # In HBM: the result.
    "dq "
    # In shared memory: a ring for each of these seven.
    "row_ring d_ring sums_ring order_ring k_ring v_ring k_order_ring filled emptied",
)


def _backward_q_kernel(*arguments, plan):
    refs, scratch = named(_BackwardQRefs, arguments)
    wg = jax.lax.axis_index("wg")
    unit = UNITS[plan.unit](scratch, plan.lanes, plan.interpret)
    first, count = _span(refs.starts, plan)
    parts = plan.size // PART

    def visit(slot, acc):
        lse, delta = (load(refs.sums_ring.at[slot, i, wg], unit, 1) for i in range(2))
        scores = unit.product(
            refs.row_ring.at[wg].at[slot], refs.k_ring.at[slot].transpose((1, 0))
        ) * (plan.scale * LOG2_E)
        scores = _mask(scores, refs.order_ring.at[slot, wg], refs.k_order_ring.at[slot], unit)
        weights = jnp.exp2(scores - spread(lse * LOG2_E, scores.shape, 0))
        d_weights = unit.product(
            refs.d_ring.at[wg].at[slot], refs.v_ring.at[slot].transpose((1, 0))
        )
        d_scores = weights * (d_weights - spread(delta, scores.shape, 0))
        return unit.add(acc, d_scores.astype(refs.k_ring.dtype), refs.k_ring.at[slot], 0)

    def compute():
        @pl.loop(0, count)
        def _(tile):
            acc = visits(
                tile * parts,
                (tile + 1) * parts,
                refs.filled,
                refs.emptied,
                visit,
                unit.zero(0),
                plan.steps,
            )
            own = pl.ds(tile_at(first + tile, plan) * ROWS + wg * unit.tile, unit.tile)
            refs.dq.at[own][...] = unit.value(acc, 0) * plan.scale

    def sources(step):
        tile = first + jax.lax.div(step, jnp.int32(parts))
        keys = key_sources(
            refs.block,
            tile,
            jax.lax.rem(step, jnp.int32(parts)),
            refs.k,
            refs.v,
            refs.k_order,
            plan,
        )
        return (*row_sources(tile), *keys)

    arrays = (refs.rows, refs.d_rows, refs.sums, refs.order)
    row_sources, slots = row_copies(
        refs.query,
        arrays,
        (refs.row_ring, refs.d_ring, refs.sums_ring, refs.order_ring),
        unit.tile,
        unit,
        plan,
    )
    rings = (*slots, refs.k_ring, refs.v_ring, refs.k_order_ring)
    specialise_warps(
        wg,
        unit,
        compute,
        lambda: fetch(count * parts, sources, rings, refs.filled, refs.emptied, plan.steps),
    )


def _span(starts, plan: KernelSizes):
    """(the first of a thread block's tiles, how many there are)."""
    row = jax.lax.axis_index("row")
    block = jax.lax.axis_index("block")
    first = block * plan.span
    # starts[row, J] is the number of tiles in use; there may be none for this thread block
    return first, jnp.clip(starts[row, plan.blocks] - first, 0, plan.span)


def _mask(scores, queries, keys, unit):
    """The scores [queries, keys], MASKED where a query does not see a key.

    queries, keys: references to their orders.
    """
    seen = spread(load(keys, unit, 0), scores.shape, 1) <= spread(
        load(queries, unit, 1), scores.shape, 0
    )
    return jnp.where(seen, scores, MASKED)
