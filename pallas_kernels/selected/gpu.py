"""Attention over chosen blocks on GPU (Mosaic GPU), in tiles of 128 query rows.

Forward, and for the gradient of queries, a thread block goes through consecutive tiles. For each
tile it goes through its block in parts of 64 keys. The rows of a tile are copied again for every
part, and the keys of a block for every tile, but they are then still in the L2 cache.

The gradients of keys and values are in ``gpu_keys``.

One more warpgroup copies ahead into a ring of buffers in shared memory. ``matrix_units`` multiplies
on Hopper and on Blackwell. XLA gathers the rows of queries, because the copy engine of Hopper
cannot gather rows; only Blackwell's can.

Head sizes are padded to a multiple of 64, and tiles to 128 rows.

Dimensions: E lists of all rows, L tiles, R G rows of a tile, J blocks, H head size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash.gpu import LOG2_E
from pallas_kernels.matrix_units import UNITS, full, spread, tiles
from pallas_kernels.pipeline import barriers, fetch, specialise_warps, visits
from pallas_kernels.selected import gpu_keys
from pallas_kernels.selected.gpu_memory import (
    PART,
    ROWS,
    Plan,
    by_warpgroup,
    flat,
    flat_keys,
    key_rings,
    key_sources,
    launch,
    load,
    make_plan,
    own_rows,
    row_rings,
    row_slots,
    row_sources,
    tile_at,
    tiled,
)
from pallas_kernels.selected.tuning import TuningConfig
from pallas_kernels.tokens import MASKED

DTYPES = ("bfloat16",)
# The devices that the kernels are written for.
TARGETS = ("h100", "h200", "gb200")
ELSEWHERE = "no kernel for this GPU"
# How often the backward pass computes the weights: for queries' gradients and for keys'.
PASSES = 2
# Sums the gradients of keys and values block by block, across all queries.
BY_BLOCK = gpu_keys


def obstacle(q_shape: tuple[int, ...], lists: int, size: int, tiles: int) -> str | None:
    """Why the kernels cannot run q [B, T, N, H] with these numbers of lists and tiles and this size
    of blocks, or None.
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


def forward(
    rows: jax.Array,
    order: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_order: jax.Array,
    block: jax.Array,
    starts: jax.Array,
    *,
    tuning: TuningConfig,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the rows of each tile to the block of the tile.

    rows: [E, L, R G, H]. order: int32 [E, L, R G]. k, v: [B, K, J, size, H]. k_order: int32 [B, J,
    size]. block: int32 [E, L], and starts: int32 [E, J + 1], as in ``Tiles``.

    Returns (out [E, L, R G, H] in v's dtype, lse float32 [E, L, R G]). The lse of a row that sees
    nothing is about MASKED. Tiles from starts[J] on are not written.
    """
    plan = make_plan(rows, k, tuning, interpret)
    unit = UNITS[plan.unit]
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
            # copies of a step: each warpgroup's rows, their order, keys, values and their order
            *barriers(plan.steps, unit.compute, arrays=unit.compute + 4),
            *unit.scratch(PART, plan.lanes, 1, v.dtype),
        ],
        **launch(plan, -(-plan.tiles // plan.span), interpret),
    )(block, starts, flat(rows), by_warpgroup(order, unit, unit.tile), *flat_keys(k, v, k_order))
    return tiled(out, rows.shape), tiled(lse[:, None], (*rows.shape[:3], 1))[..., 0]


def backward_q(
    rows, d_rows, sums, order, k, v, k_order, block, starts, *, tuning, interpret=False
) -> jax.Array:
    """The gradient of every tile's rows, float32 [E, L, R G, H].

    d_rows: [E, L, R G, H], the cotangents of the rows. sums: float32 [E, L, 2, R G], lse and delta.
    The other arguments are those of ``forward``.
    """
    plan = make_plan(rows, k, tuning, interpret)
    unit = UNITS[plan.unit]
    dtype = k.dtype
    dq = plgpu.kernel(
        functools.partial(_backward_q_kernel, plan=plan),
        kernel_name="selected_backward_q",
        out_type=jax.ShapeDtypeStruct((plan.lists * plan.tiles * ROWS, plan.lanes), jnp.float32),
        scratch_types=[
            *row_rings(plan, unit.tile, dtype),
            *key_rings(plan, dtype),
            *barriers(plan.steps, unit.compute, arrays=2 * unit.compute + 5),
            *unit.scratch(PART, plan.lanes, 1, dtype),
        ],
        **launch(plan, -(-plan.tiles // plan.span), interpret),
    )(
        block,
        starts,
        flat(rows),
        flat(d_rows),
        by_warpgroup(sums, unit, unit.tile),
        by_warpgroup(order, unit, unit.tile),
        *flat_keys(k, v, k_order),
    )
    return tiled(dq, rows.shape)


# --- Kernels --------------------------------------------------------------------------------------


def _forward_kernel(
    block, starts, rows, order, k, v, k_order, out, lse,
    row_ring, order_ring, k_ring, v_ring, k_order_ring, filled, emptied, *refs, plan
):  # fmt: skip
    wg = jax.lax.axis_index("wg")
    unit = UNITS[plan.unit](refs, plan.lanes, plan.interpret)
    first, count = _span(starts, plan)
    parts = plan.size // PART

    def visit(slot, carry):
        top, total, acc = carry
        scores = unit.product(row_ring.at[wg].at[slot], k_ring.at[slot].transpose((1, 0))) * (
            plan.scale * LOG2_E
        )
        scores = _mask(scores, order_ring.at[slot, wg], k_order_ring.at[slot], unit)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - spread(new_top, scores.shape, 0))
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + weights.sum(axis=1)
        return (
            new_top,
            total,
            unit.shrink_and_add(acc, shrink, weights.astype(v_ring.dtype), v_ring.at[slot]),
        )

    def compute():
        @pl.loop(0, count)
        def _(tile):
            column = unit.layout.reduce(1)
            # above MASKED, so that a masked score weighs nothing even before a visible key was met
            start = (
                full((unit.tile,), MASKED / 2, column),
                full((unit.tile,), 0, column),
                full((unit.tile, plan.lanes), 0, unit.layout),
            )
            # steps count through the parts of all tiles, so that the copies run on from one tile to
            # the next
            top, total, acc = visits(
                tile * parts, (tile + 1) * parts, filled, emptied, visit, start, plan.steps
            )
            nothing = total == 0.0
            divisor = jnp.where(nothing, 1.0, total)
            own = pl.ds(tile_at(first + tile, plan) * ROWS + wg * unit.tile, unit.tile)
            out.at[own][...] = (acc / spread(divisor, acc.shape, 0)).astype(out.dtype)
            lse.at[own][...] = jnp.where(nothing, MASKED, (top + jnp.log2(divisor)) * (1 / LOG2_E))

    def sources(step):
        tile = first + jax.lax.div(step, jnp.int32(parts))
        keys = key_sources(block, tile, jax.lax.rem(step, jnp.int32(parts)), k, v, k_order, plan)
        at = tile_at(tile, plan)
        return (*own_rows(rows, at, unit.tile, unit), order.at[at], *keys)

    rings = (
        *(row_ring.at[i] for i in range(unit.compute)),
        order_ring,
        k_ring,
        v_ring,
        k_order_ring,
    )
    specialise_warps(
        wg, unit, compute, lambda: fetch(count * parts, sources, rings, filled, emptied, plan.steps)
    )


def _backward_q_kernel(
    block, starts, rows, d_rows, sums, order, k, v, k_order, dq,
    row_ring, d_ring, sums_ring, order_ring, k_ring, v_ring, k_order_ring, filled, emptied,
    *refs, plan
):  # fmt: skip
    wg = jax.lax.axis_index("wg")
    unit = UNITS[plan.unit](refs, plan.lanes, plan.interpret)
    first, count = _span(starts, plan)
    parts = plan.size // PART

    def visit(slot, acc):
        lse, delta = (load(sums_ring.at[slot, i, wg], unit, 1) for i in range(2))
        scores = unit.product(row_ring.at[wg].at[slot], k_ring.at[slot].transpose((1, 0))) * (
            plan.scale * LOG2_E
        )
        scores = _mask(scores, order_ring.at[slot, wg], k_order_ring.at[slot], unit)
        weights = jnp.exp2(scores - spread(lse * LOG2_E, scores.shape, 0))
        d_weights = unit.product(d_ring.at[wg].at[slot], v_ring.at[slot].transpose((1, 0)))
        d_scores = weights * (d_weights - spread(delta, scores.shape, 0))
        return unit.add(acc, d_scores.astype(k_ring.dtype), k_ring.at[slot], 0)

    def compute():
        @pl.loop(0, count)
        def _(tile):
            acc = visits(
                tile * parts, (tile + 1) * parts, filled, emptied, visit, unit.zero(0), plan.steps
            )
            own = pl.ds(tile_at(first + tile, plan) * ROWS + wg * unit.tile, unit.tile)
            dq.at[own][...] = unit.value(acc, 0) * plan.scale

    def sources(step):
        tile = first + jax.lax.div(step, jnp.int32(parts))
        keys = key_sources(block, tile, jax.lax.rem(step, jnp.int32(parts)), k, v, k_order, plan)
        return (
            *row_sources(rows, d_rows, sums, order, tile_at(tile, plan), unit.tile, unit),
            *keys,
        )

    rings = (
        *row_slots(row_ring, d_ring, unit),
        sums_ring,
        order_ring,
        k_ring,
        v_ring,
        k_order_ring,
    )
    specialise_warps(
        wg, unit, compute, lambda: fetch(count * parts, sources, rings, filled, emptied, plan.steps)
    )


def _span(starts, plan: Plan):
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
