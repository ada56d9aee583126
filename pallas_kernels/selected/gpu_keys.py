"""Gradients of keys and values of attention over chosen blocks on GPU (Mosaic GPU).

A thread block holds a part of a block of keys. It goes through a span of the block's tiles, across
all queries of a row, with transposed scores (keys by queries). The warpgroups share out the rows of
a tile, not the keys, so that even a block of 64 keys keeps all of them busy. Each has a sum of its
own for each span. A second kernel adds these up, in a fixed order, so that results repeat bit for
bit. It reads and writes every gradient once: the time of both kernels grows with the number of
picks, and not with its square, as it would if every chunk of queries went over all keys.

Dimensions: those of ``gpu``, U spans, W slabs of sums of a span: parts of a block times warpgroups.
"""

from __future__ import annotations

import collections
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matrix_units import LOG2_E, UNITS, spread, tiles
from pallas_kernels.pipeline import barriers, fetch, named, specialise_warps, visits
from pallas_kernels.selected.gpu_memory import (
    ROWS,
    SHARE,
    KernelSizes,
    flat_keys,
    launch,
    load,
    make_plan,
    row_arrays,
    row_copies,
    row_copy_count,
    row_rings,
)
from pallas_kernels.selected.tiles import Spans
from pallas_kernels.selected.tuning import TuningConfig
from pallas_kernels.tokens import MASKED


def slabs(rows: jax.Array, k: jax.Array, tuning: TuningConfig) -> tuple[int, int, int]:
    """(W, rows of a slab, lanes) of what ``backward_kv`` returns, for its arguments."""
    plan = make_plan(rows, k, None, tuning, interpret=False)
    unit = UNITS[plan.unit]
    return plan.size // plan.held * unit.compute, unit.tile, plan.lanes


def backward_kv(
    rows: jax.Array,
    d_rows: jax.Array,
    sums: jax.Array,
    order: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_order: jax.Array,
    spans: Spans,
    *,
    query: jax.Array | None = None,
    tuning: TuningConfig,
    interpret=False,
) -> list[jax.Array]:
    """The part that each span adds to the gradients of its block's keys and values, for
    ``sum_spans``.

    rows, d_rows: [E, L, R G, H], queries and their cotangents, in tiles. sums: float32 [E, L, 2, R
    G], lse and delta. order: int32 [E, L, R G]. k, v: [B, K, J, size, H]. k_order: int32 [B, J,
    size]. spans: [E, U] each, of these tiles. query: as for ``gpu.backward_q``.

    Returns two arrays float32 [E, U, W, rows of a slab, lanes].
    """
    plan = make_plan(rows, k, query, tuning, interpret)
    unit = UNITS[plan.unit]
    arrays = row_arrays(query, (rows, d_rows, sums, order), SHARE, unit, plan)
    copies = row_copy_count(4, SHARE, unit, plan)
    parts = plan.size // plan.held
    count = spans.block.shape[1]
    # A product may have more rows (``unit.tile``) than keys are held. The further rows read orders
    # past the end, hence the padding, and buffers that nothing was copied to; ``sum_spans`` leaves
    # their results out.
    shape = (plan.lists, count, *slabs(rows, k, tuning))
    k, v, k_order = flat_keys(k, v, k_order)
    k_order = jnp.pad(k_order, ((0, 0), (0, unit.tile - plan.held)))
    found = plgpu.kernel(
        functools.partial(_backward_kv_kernel, plan=plan, count=count),
        kernel_name="selected_backward_kv",
        out_type=[jax.ShapeDtypeStruct((math.prod(shape[:4]), plan.lanes), jnp.float32)] * 2,
        scratch_types=[
            tiles((unit.tile, plan.lanes), k.dtype),
            tiles((unit.tile, plan.lanes), k.dtype),
            plgpu.Barrier(num_arrivals=2),
            *row_rings(plan, SHARE, k.dtype),
            *barriers(plan.steps, unit.compute, arrays=copies),
            *unit.scratch(SHARE, plan.lanes, 2, k.dtype),
        ],
        **launch(plan, count * parts, interpret),
    )(
        jnp.stack(spans[:3], axis=-1),
        *arrays,
        k,
        v,
        k_order,
    )
    return [x.reshape(shape) for x in found]


def sum_spans(
    found: jax.Array,
    starts: jax.Array,
    k_shape: tuple[int, ...],
    dtype,
    *,
    tuning: TuningConfig,
    interpret=False,
) -> jax.Array:
    """The gradient [B, K, J, size, H] of ``k_shape``, summed over the spans of each block.

    found: float32 [E, U, W, rows of a slab, lanes], from ``backward_kv``. starts: int32 [E, J + 1],
    the spans of each block. Lists of the same key/value head are summed too.
    """
    batch, heads, blocks, size, head_dim = k_shape
    lists, spans, slabs, rows, lanes = found.shape
    shares = UNITS[tuning.matrix_unit].compute
    parts = slabs // shares
    each = lists // (batch * heads)
    held = size // parts

    def kernel(found, starts, out):
        head, part = (jax.lax.axis_index(name) for name in ("head", "part"))
        block = jax.lax.div(part, jnp.int32(parts))
        within = jax.lax.rem(part, jnp.int32(parts))

        # the lists of a head, the spans of its block in each, and the warpgroups of a span
        def one_list(index, total):
            row = head * each + index

            def one_span(span, total):
                first = ((row * spans + span) * parts + within) * shares
                for share in range(shares):
                    total += found.at[pl.ds((first + share) * rows, held)][...]
                return total

            return jax.lax.fori_loop(starts[row, block], starts[row, block + 1], one_span, total)

        layout = plgpu.Layout.WG_STRIDED((held, lanes), vec_size=4)
        total = plgpu.layout_cast(jnp.zeros((held, lanes), jnp.float32), layout)
        total = jax.lax.fori_loop(0, each, one_list, total)
        out.at[pl.ds((head * blocks * parts + part) * held, held)][...] = total.astype(dtype)

    out = plgpu.kernel(
        kernel,
        kernel_name="selected_sum_spans",
        out_type=jax.ShapeDtypeStruct((batch * heads * blocks * size, lanes), dtype),
        grid=(blocks * parts, batch * heads),
        grid_names=("part", "head"),
        interpret=interpret or None,
    )(found.reshape(-1, lanes), starts)
    return out.reshape(batch, heads, blocks, size, lanes)[..., :head_dim]


# The memory of ``_backward_kv_kernel``.
_Refs = collections.namedtuple(
    "_Refs",
    # In HBM: the block of each span and its tiles; the queries of each tile.
    "spans query "
    # In HBM: queries, cotangents, lse and delta, and order; keys, values and their order.
    "rows d_rows sums order k v k_order "
    # In HBM: the results.
    "dk dv "
    # In shared memory: the keys and values of the span's block, and their barrier.
    "k_own v_own loaded "
    # Rings of queries, cotangents, lse and delta, and order, and the barriers of their slots.
    "row_ring d_ring sums_ring order_ring filled emptied",
)


def _backward_kv_kernel(*arguments, plan: KernelSizes, count: int):
    refs, scratch = named(_Refs, arguments)
    row, part, wg = (jax.lax.axis_index(name) for name in ("row", "block", "wg"))
    unit = UNITS[plan.unit](scratch, plan.lanes, plan.interpret)
    parts = plan.size // plan.held
    span = jax.lax.div(part, jnp.int32(parts))
    block, begin, end = (refs.spans[row, span, i] for i in range(3))
    within = jax.lax.rem(part, jnp.int32(parts)) * plan.held
    # The warpgroups together take SHARE rows each at a time: a whole tile with two of them, half a
    # tile with one. Steps count these turns, over the consecutive tiles of the span.
    turns = ROWS // (SHARE * unit.compute)
    first = begin * turns
    steps = (end - begin) * turns

    def compute():
        batch, place = plan.order(row, block)
        # rows of the scores are keys, columns are queries
        keys = plgpu.load(
            refs.k_order.at[batch, pl.ds(place + within, unit.tile)],
            layout=unit.layout.reduce(1),
            optimized=False,
        )
        plgpu.barrier_wait(refs.loaded)

        def visit(slot, carry):
            dk_acc, dv_acc = carry
            lse, delta = (load(refs.sums_ring.at[slot, i, wg], unit, 0) for i in range(2))
            queries = load(refs.order_ring.at[slot, wg], unit, 0)
            scores = unit.product(refs.k_own, refs.row_ring.at[wg].at[slot].transpose((1, 0))) * (
                plan.scale * LOG2_E
            )
            seen = spread(keys, scores.shape, 0) <= spread(queries, scores.shape, 1)
            scores = jnp.where(seen, scores, MASKED)
            weights = jnp.exp2(scores - spread(lse * LOG2_E, scores.shape, 1))
            dv_acc = unit.add(
                dv_acc, weights.astype(refs.d_ring.dtype), refs.d_ring.at[wg].at[slot], 1
            )
            d_weights = unit.product(refs.v_own, refs.d_ring.at[wg].at[slot].transpose((1, 0)))
            d_scores = weights * (d_weights - spread(delta, scores.shape, 1))
            return unit.add(
                dk_acc, d_scores.astype(refs.row_ring.dtype), refs.row_ring.at[wg].at[slot], 0
            ), dv_acc

        start = unit.zero(0), unit.zero(1)
        dk_acc, dv_acc = visits(0, steps, refs.filled, refs.emptied, visit, start, plan.steps)
        # every warpgroup writes its own sum: [E, U, parts, warpgroups, unit.tile, lanes]
        held = row * (count * parts) + part
        own = pl.ds((held * unit.compute + wg) * unit.tile, unit.tile)
        refs.dk.at[own][...] = unit.value(dk_acc, 0) * plan.scale
        refs.dv.at[own][...] = unit.value(dv_acc, 1)

    def copy():
        # all warpgroups that compute read the same keys, which the copying one therefore fetches
        mine = pl.ds(plan.key(row, block) + within, plan.held)
        plgpu.copy_gmem_to_smem(refs.k.at[mine], refs.k_own.at[pl.ds(0, plan.held)], refs.loaded)
        plgpu.copy_gmem_to_smem(refs.v.at[mine], refs.v_own.at[pl.ds(0, plan.held)], refs.loaded)
        arrays = (refs.rows, refs.d_rows, refs.sums, refs.order)
        rings = (refs.row_ring, refs.d_ring, refs.sums_ring, refs.order_ring)
        sources, slots = row_copies(refs.query, arrays, rings, SHARE, unit, plan)
        fetch(
            steps, lambda step: sources(first + step), slots, refs.filled, refs.emptied, plan.steps
        )

    specialise_warps(wg, unit, compute, copy)
