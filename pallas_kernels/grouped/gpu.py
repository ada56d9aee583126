"""Grouped products on GPU (Mosaic GPU), for Hopper and for Blackwell.

A thread block computes one block of a result. One of its warpgroups copies what the next steps need
into a ring of buffers in shared memory; the others multiply, and share out the rows of the block.

- Product: every group's rows are cut into blocks of their own. Its first and last blocks may reach
  into the rows of its neighbours, and are written only as far as its own rows go. The blocks are
  listed before the kernel starts, as many as there can be, and those that there are not do nothing.
- Outer product: a thread block goes through all rows of its group and sets those that are another
  group's to 0.

JAX's own kernels (``jax.experimental.pallas.ops.gpu``) are not used: they read the sizes of all
groups for every block, in a loop that is unrolled; on Blackwell they have neither transposed
matrices nor the outer product; and they ask the device at hand how many cores it has, so that
nothing can be compiled for another.

The copy engine reads tiles of 8 rows and 64 columns. A group's first block therefore begins at a
multiple of 8 rows, and arrays are filled up to whole tiles. Past the end of an array it reads 0 and
writes nothing.

Dimensions: P rows, E groups, D and F sizes of a matrix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped.blocks import TuningConfig
from pallas_kernels.matrix_units import COLUMNS, SWIZZLE, UNITS, full, tiles
from pallas_kernels.pipeline import fetch, specialise_warps

DTYPES = ("bfloat16", "float16")
# Elements of a tile's row in shared memory, of two bytes each.
_LANES = SWIZZLE // 2
# Rows of a tile in shared memory: copies begin at a multiple of them.
_ALIGNED = 8
# Columns of a block from which ``_columns`` chooses.
_WIDTHS = (256, 192, 128, 64)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static arguments of a kernel."""

    # Rows and columns of a block of the result.
    rows: int
    columns: int
    # Elements that are added in one step.
    contracted: int
    # Slots of the ring.
    steps: int
    # A key of ``matrix_units.UNITS``.
    unit: str
    # Whether matrices are given with their columns as rows.
    transposed: bool = False


def product(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool,
    tuning: TuningConfig,
    interpret: Any = False,
) -> jax.Array:
    """As ``reference.product``."""
    given, columns = len(x), w.shape[1 if transposed else 2]
    plan = _plan(tuning, columns, tuning.contracted, transposed)
    matrix = (plan.columns, plan.contracted) if transposed else (plan.contracted, plan.columns)
    x = _filled(x, plan.rows, plan.contracted)
    w = _filled(w, *matrix)
    wide = w.shape[1 if transposed else 2]
    listed = _blocks(sizes, len(x), plan.rows)
    unit = UNITS[plan.unit]
    dtype = x.dtype
    out = plgpu.kernel(
        functools.partial(_product_kernel, plan=plan, count=pl.cdiv(x.shape[1], plan.contracted)),
        kernel_name="grouped_product",
        out_type=jax.ShapeDtypeStruct((len(x), wide), dtype),
        scratch_types=[
            tiles((plan.steps, plan.rows, plan.contracted), dtype),
            tiles((plan.steps, *matrix), dtype),
            tiles((unit.compute, unit.tile, plan.columns), dtype),
            plgpu.SMEM((unit.compute, unit.tile, COLUMNS), dtype),
            *_scratch(plan, copies=2),
        ],
        grid=(len(listed), pl.cdiv(wide, plan.columns)),
        grid_names=("block", "column"),
        **_launch(unit, interpret),
    )(listed, x, w)
    # nothing is written behind the last group's rows
    return jnp.where((jnp.arange(given) < jnp.sum(sizes))[:, None], out[:given, :columns], 0)


def outer_product(
    x: jax.Array, y: jax.Array, sizes: jax.Array, *, tuning: TuningConfig, interpret: Any = False
) -> jax.Array:
    """As ``reference.outer_product``. A value that is not finite may also reach the group before
    its own.
    """
    size, columns = x.shape[1], y.shape[1]
    plan = _plan(tuning, columns, _LANES, False)
    unit = UNITS[plan.unit]
    dtype = x.dtype
    x = _filled(x, plan.contracted, unit.tile)
    y = _filled(y, plan.contracted, plan.columns)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    # a group without rows has no steps
    firsts = jnp.where(sizes > 0, starts // _ALIGNED * _ALIGNED, ends)
    table = jnp.stack([firsts, starts, ends], axis=1).astype(jnp.int32)
    shape = (len(sizes), x.shape[1], y.shape[1])
    out = plgpu.kernel(
        functools.partial(_outer_kernel, plan=plan),
        kernel_name="grouped_outer_product",
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        scratch_types=[
            tiles((unit.compute, plan.steps, plan.contracted, unit.tile), dtype),
            tiles((plan.steps, plan.contracted, plan.columns), dtype),
            tiles((unit.compute, unit.tile, plan.columns), dtype),
            *_scratch(plan, copies=unit.compute + 1),
        ],
        grid=(len(sizes), pl.cdiv(shape[1], plan.rows), pl.cdiv(shape[2], plan.columns)),
        grid_names=("group", "block", "column"),
        **_launch(unit, interpret),
    )(table, x, y)
    return out[:, :size, :columns]


# --- Kernels --------------------------------------------------------------------------------------


def _product_kernel(
    listed, x, w, out, x_ring, w_ring, whole, part, filled, emptied, *refs, plan: _Plan, count: int
):
    block, column, wg = (jax.lax.axis_index(name) for name in ("block", "column", "wg"))
    unit = UNITS[plan.unit]
    group, first, low, high = (listed[block, i] for i in range(4))
    first = pl.multiple_of(first, _ALIGNED)
    # a block that there is not has no rows
    steps = jnp.where(high > low, count, 0)
    across = pl.ds(column * plan.columns, plan.columns)

    def operands(slot):
        matrix = w_ring.at[slot]
        own = pl.ds(wg * unit.tile, unit.tile)
        return x_ring.at[slot, own], matrix.transpose((1, 0)) if plan.transposed else matrix

    def compute():
        columns = _sum(plan, steps, operands, filled, emptied, refs)
        start = wg * unit.tile
        above = jnp.clip(low - start, 0, unit.tile)
        own = jnp.clip(high - start, 0, unit.tile) - above
        rows = first + start

        @pl.when(own == unit.tile)
        def _():
            _store(plan, columns, whole.at[wg], out.at[pl.ds(rows, unit.tile), across])

        @pl.when((own > 0) & (own < unit.tile))
        def _():
            for at in range(0, plan.columns, COLUMNS):
                # the columns before have been read
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                part[wg] = columns(at).astype(part.dtype)
                plgpu.commit_smem()
                _store_rows(part.at[wg], out, above, own, rows, column * plan.columns + at)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def sources(step):
        along = pl.ds(step * plan.contracted, plan.contracted)
        matrix = w.at[group, across, along] if plan.transposed else w.at[group, along, across]
        return x.at[pl.ds(first, plan.rows), along], matrix

    rings = (x_ring, w_ring)
    specialise_warps(
        wg, unit, compute, lambda: fetch(steps, sources, rings, filled, emptied, plan.steps)
    )


def _outer_kernel(table, x, y, out, x_ring, y_ring, whole, filled, emptied, *refs, plan: _Plan):
    group, block, column, wg = (
        jax.lax.axis_index(name) for name in ("group", "block", "column", "wg")
    )
    unit = UNITS[plan.unit]
    first, start, end = (table[group, i] for i in range(3))
    first = pl.multiple_of(first, _ALIGNED)
    steps = jax.lax.div(end - first + plan.contracted - 1, jnp.int32(plan.contracted))
    across = pl.ds(column * plan.columns, plan.columns)

    def compute():
        def operands(slot):
            return x_ring.at[wg, slot].transpose((1, 0)), y_ring.at[slot]

        def clear(step, slot):
            """Sets the rows of other groups to 0."""
            low = start - first - step * plan.contracted
            high = end - first - step * plan.contracted

            @pl.when((low > 0) | (high < plan.contracted))
            def _():
                part = x_ring.at[wg, slot]
                layout = plgpu.Layout.WGMMA
                rows = plgpu.load(part, layout=layout)
                number = plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=layout)
                own = (number >= low) & (number < high)
                part[...] = jnp.where(own, rows, jnp.zeros_like(rows))
                # the matrix unit sees what was stored only after this fence
                plgpu.commit_smem()

        columns = _sum(plan, steps, operands, filled, emptied, refs, clear)
        rows = pl.ds(block * plan.rows + wg * unit.tile, unit.tile)
        _store(plan, columns, whole.at[wg], out.at[group, rows, across])

    def sources(step):
        rows = pl.ds(first + step * plan.contracted, plan.contracted)
        parts = [
            x.at[rows, pl.ds(block * plan.rows + part * unit.tile, unit.tile)]
            for part in range(unit.compute)
        ]
        return *parts, y.at[rows, across]

    rings = (*(x_ring.at[part] for part in range(unit.compute)), y_ring)
    specialise_warps(
        wg, unit, compute, lambda: fetch(steps, sources, rings, filled, emptied, plan.steps)
    )


def _sum(
    plan: _Plan,
    steps,
    operands: Callable,
    filled,
    emptied,
    refs: tuple,
    prepare: Callable = lambda step, slot: None,
) -> Callable:
    """The sum of the products of all steps [unit.tile, columns], as a function from a column to it
    and the ``COLUMNS`` - 1 next to it, in float32.

    operands: from a slot to what is multiplied in it. refs: what the matrix unit needs besides.
    prepare: is called before each product.
    """

    def at(step):
        return jax.lax.rem(step, jnp.int32(plan.steps))

    def arrived(step):
        slot = at(step)
        plgpu.barrier_wait(filled.at[slot])
        prepare(step, slot)
        return slot

    def on_hopper(acc):
        @pl.loop(0, steps)
        def _(step):
            plgpu.wgmma(acc, *operands(arrived(step)))
            # all but this product are done, and the buffers of the one before are free
            plgpu.wgmma_wait(1)

            @pl.when(step > 0)
            def _():
                plgpu.barrier_arrive(emptied.at[at(step - 1)])

        found = acc[...]

        @pl.when(steps > 0)
        def _():
            plgpu.barrier_arrive(emptied.at[at(steps - 1)])

        return found

    def on_blackwell(acc, done):
        @pl.when(steps == 0)
        def _():
            plgpu.async_store_tmem(acc, full(acc.shape, 0.0, plgpu.Layout.TCGEN05))
            plgpu.commit_tmem()

        @pl.loop(0, steps)
        def _(step):
            slot = arrived(step)
            # the matrix unit itself reports that it is done with the buffers
            plgpu.tcgen05_mma(acc, *operands(slot), emptied.at[slot], accumulate=step > 0)

        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)

        def columns(first: int):
            part = acc.at[:, pl.ds(first, COLUMNS)]
            found = plgpu.async_load_tmem(part, layout=plgpu.Layout.TCGEN05)
            plgpu.wait_load_tmem()
            return found

        return columns

    if plan.unit == "tcgen05":
        return on_blackwell(*refs)
    tile = UNITS[plan.unit].tile
    found = pl.run_scoped(on_hopper, plgpu.ACC((tile, plan.columns), jnp.float32))
    return lambda first: found[:, first : first + COLUMNS]


def _store(plan: _Plan, columns: Callable, whole, out) -> None:
    """Writes all rows of a sum to ``out``, through shared memory without bank conflicts."""
    for first in range(0, plan.columns, COLUMNS):
        whole.at[:, pl.ds(first, COLUMNS)][...] = columns(first).astype(whole.dtype)
    # the copy engine sees what was stored only after this fence
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(whole, out)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_rows(part, out, above, count, rows, column) -> None:
    """Writes ``count`` rows of part [unit.tile, COLUMNS], below the first ``above``, to ``out``.

    Copies have fixed sizes, so any number of rows is written by powers of 2. Parts of tiles of 8
    rows cannot be copied, so part has none, and there are bank conflicts.
    """
    size = part.shape[0] // 2
    while size:
        some = count & size

        @pl.when(some != 0)
        def _(above=above, size=size):
            place = out.at[pl.ds(rows + above, size), pl.ds(column, COLUMNS)]
            plgpu.copy_smem_to_gmem(part.at[pl.ds(above, size)], place)

        above = above + some
        size //= 2


# --- How the work is cut --------------------------------------------------------------------------


def _launch(unit, interpret: Any) -> dict:
    """Options of both kernels."""
    return {
        "num_threads": unit.compute + 1,
        "thread_name": "wg",
        "compiler_params": plgpu.CompilerParams(),
        "interpret": interpret or None,
    }


def _scratch(plan: _Plan, copies: int) -> list:
    """The barriers of a ring that ``copies`` fill, and what the matrix unit needs."""
    unit = UNITS[plan.unit]
    filled = plgpu.Barrier(num_arrivals=copies, num_barriers=plan.steps)
    if plan.unit == "wgmma":
        return [filled, plgpu.Barrier(num_arrivals=unit.compute, num_barriers=plan.steps)]
    emptied = plgpu.Barrier(num_barriers=plan.steps, orders_tensor_core=True)
    sums = plgpu.TMEM((unit.tile, plan.columns), jnp.float32)
    return [filled, emptied, sums, plgpu.Barrier(orders_tensor_core=True)]


def _blocks(sizes: jax.Array, rows: int, height: int) -> jax.Array:
    """For each block (its group, its first row, and from which of its rows to before which are the
    group's), int32 [blocks, 4]. There are as many as there can be; the last ones may have no rows.
    """
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    firsts = starts // _ALIGNED * _ALIGNED
    counts = jnp.where(sizes > 0, -(-(ends - firsts) // height), 0)
    behind = jnp.cumsum(counts)
    # a group adds at most one block that is not full, and the rows of others in its first block
    most = (rows + (_ALIGNED - 1) * len(sizes)) // height + min(len(sizes), rows)
    number = jnp.arange(most)
    group = jnp.sum(behind[None] <= number[:, None], axis=1)
    group = jnp.minimum(group, len(sizes) - 1)
    first = firsts[group] + (number - (behind - counts)[group]) * height
    low = jnp.maximum(starts[group] - first, 0)
    high = jnp.minimum(ends[group] - first, height)
    listed = jnp.stack([group, first, low, high], axis=1)
    return jnp.where((number < behind[-1])[:, None], listed, 0).astype(jnp.int32)


def _plan(tuning: TuningConfig, columns: int, contracted: int, transposed: bool) -> _Plan:
    unit = UNITS[tuning.matrix_unit]
    if tuning.rows != unit.tile * unit.compute:
        raise ValueError(
            f"rows={tuning.rows} must be {unit.tile * unit.compute} for {tuning.matrix_unit}"
        )
    if contracted % _LANES or tuning.columns < _LANES:
        raise ValueError(
            f"contracted={contracted} must be a multiple of {_LANES}, and "
            f"columns={tuning.columns} at least {_LANES}"
        )
    return _Plan(
        rows=tuning.rows,
        columns=_columns(columns, tuning.columns),
        contracted=contracted,
        steps=tuning.steps,
        unit=tuning.matrix_unit,
        transposed=transposed,
    )


def _columns(columns: int, most: int) -> int:
    """Columns of a block, such that little is computed in vain; among equals the widest."""
    widths = [width for width in _WIDTHS if width <= most]
    return min(widths, key=lambda width: -(-columns // width) * width)


def _filled(x: jax.Array, *least: int) -> jax.Array:
    """x with zeros, so that its last two axes have whole tiles and at least a block of this size:
    what is copied at once may not be larger than the array.
    """
    sizes = zip(x.shape[-2:], (_ALIGNED, _LANES), least, strict=True)
    more = [max(-size % tile, block - size) for size, tile, block in sizes]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, n) for n in more]) if any(more) else x
