"""Attention of few tokens to compressed keys in pages on GPU (Mosaic GPU).

A thread block is one split of the pages of one key/value head. One warpgroup reads the table and
copies the pages of a step side by side into a ring of buffers. The other moves them into the layout
of the matrix unit, since a page has fewer rows than eight, and multiplies. Products are transposed,
as in ``paged.gpu``: keys are the rows, and queries times heads are the columns.

Dimensions: those of ``paged``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matrix_units import KEY_UNITS, LOG2_E, spread, tiles
from pallas_kernels.padding import pad
from pallas_kernels.paged.gpu import HEAD_DIMS, attend
from pallas_kernels.paged.gpu_pages import ROWS
from pallas_kernels.paged.lists import COLUMNS
from pallas_kernels.pipeline import barriers, fetch, named, specialise_warps
from pallas_kernels.tokens import MASKED

DTYPES = ("bfloat16",)


def obstacle(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    entries: int,
    splits: int,
    keys: int,
    on: str,
) -> str | None:
    """Reason why the kernel cannot run q [B, T, N, H] and pages [pages, K, e, H], of which a
    row has ``entries`` stretches, on "tpu", "hopper" or "blackwell", or None.
    """
    (each, head_dim) = k_shape[2:]
    if keys % each:
        return f"{each} stretches of a page must divide {keys}"
    if head_dim not in (sizes := HEAD_DIMS[on]):
        return f"{head_dim=} must be one of {sizes}, the rows of a product"
    return None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static arguments of the kernel."""

    # Stretches of a page, and pages of a step.
    each: int
    width: int
    splits: int
    # K.
    heads: int
    # Query rows of a thread block.
    columns: int
    # Slots of the ring: steps in flight at the same time.
    steps: int
    # 1 / sqrt(H).
    scale: float
    # The first entry that a query sees.
    first: int
    interpret: bool
    # A key of ``matrix_units.KEY_UNITS``.
    unit: str


def forward(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    bounds: jax.Array,
    spans: jax.Array,
    real: jax.Array,
    *,
    first: int,
    keys: int,
    entries: int,
    tuning,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ``paged_tpu.forward``."""
    (batch, heads, rows, head_dim) = q.shape
    each = k_pages.shape[2]
    unit = KEY_UNITS[tuning.matrix_unit]
    plan = _Plan(
        each=each,
        width=keys // each,
        splits=tuning.splits,
        heads=heads,
        columns=COLUMNS,
        steps=tuning.steps,
        scale=head_dim**-0.5,
        first=first,
        interpret=bool(interpret),
        unit=tuning.matrix_unit,
    )
    bounds = pad(bounds + 1, plan.columns) - 1  # further rows see nothing
    q = pad(q, plan.columns, axis=2)
    padded = q.shape[2]
    blocks = padded // plan.columns
    room = -(-entries // keys) * keys
    splits = tuning.splits
    out, lse, scores = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        kernel_name="compressed_paged_attention",
        out_type=[
            jax.ShapeDtypeStruct(
                (splits, batch, heads, blocks, head_dim, plan.columns), jnp.float32
            ),
            jax.ShapeDtypeStruct((splits, batch, heads, padded), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, blocks, room, plan.columns), jnp.float32),
        ],
        scratch_types=[
            tiles((plan.columns, head_dim), q.dtype),
            plgpu.SMEM((plan.steps, keys, head_dim), k_pages.dtype),
            plgpu.SMEM((plan.steps, keys, head_dim), v_pages.dtype),
            tiles((keys, head_dim), k_pages.dtype),
            tiles((keys, head_dim), v_pages.dtype),
            plgpu.SMEM((head_dim, plan.columns), jnp.float32),
            plgpu.SMEM((plan.columns,), jnp.float32),
            plgpu.Barrier(num_barriers=1),
            *barriers(plan.steps, unit.compute, arrays=2 * plan.width),
            *unit.scratch(plan.columns, head_dim, q.dtype),
        ],
        grid=(blocks, splits, batch * heads),
        grid_names=("tile", "split", "part"),
        num_threads=unit.compute + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
    )(table, spans, bounds, real, q, k_pages, v_pages)
    out = out.swapaxes(-1, -2).reshape(splits, batch, heads, padded, head_dim)
    scores = scores.swapaxes(-1, -2).reshape(batch, heads, padded, room)
    return out[:, :, :, :rows], lse[:, :, :, :rows], scores[:, :, :rows]


# The memory of ``_kernel``.
_Refs = collections.namedtuple(
    "_Refs",
    # In HBM: pages of each row, the ends of its splits, the last entry that each query sees, which
    # entries are seen, queries, and pages of keys and values.
    "table spans bounds real q k v "
    # In HBM: the results.
    "out lse scores "
    # In shared memory: queries, rings of keys and values, and those of a step in the matrix unit's
    # layout.
    "q_own k_ring v_ring k_own v_own "
    # Results before they are copied out.
    "out_own lse_own "
    # Barriers: of the queries, and of the slots of the rings.
    "loaded filled emptied",
)


def _kernel(*arguments, plan: _Plan):
    refs, scratch = named(_Refs, arguments)
    tile, split, part, wg = (jax.lax.axis_index(x) for x in ("tile", "split", "part", "wg"))
    row = jax.lax.div(part, jnp.int32(plan.heads))
    head = jax.lax.rem(part, jnp.int32(plan.heads))
    unit = KEY_UNITS[plan.unit](scratch, plan.interpret)
    begin = refs.spans[row, 2 * split]
    end = refs.spans[row, 2 * split + 1]
    high = refs.spans[row, 2 * plan.splits]
    # no entry from here on belongs to the split
    past = jnp.minimum(end * plan.each, high + 1)
    count = jax.lax.div(end - begin + (plan.width - 1), jnp.int32(plan.width))
    own = pl.ds(tile * plan.columns, plan.columns)

    def compute():
        plgpu.copy_gmem_to_smem(refs.q.at[row, head, own], refs.q_own, refs.loaded)
        last = plgpu.load(refs.bounds.at[row, own], layout=unit.layout.reduce(0), optimized=False)
        plgpu.barrier_wait(refs.loaded)

        def visit(slot, carry):
            step, top, total, acc = carry
            place = (begin + step * plan.width) * plan.each
            _stage(refs.k_ring.at[slot], refs.k_own)
            # a weight of 0 times a value that is not finite would be NaN
            own_real = refs.real.at[row, pl.ds(place, unit.keys)]
            _stage(refs.v_ring.at[slot], refs.v_own, (own_real, plan.first - place, past - place))
            plgpu.commit_smem()
            found = unit.product(refs.k_own, refs.q_own.transpose((1, 0))) * plan.scale
            entry = plgpu.broadcasted_iota(jnp.int32, found.shape, 0, layout=unit.layout) + place
            kept = plgpu.load(own_real, layout=unit.layout.reduce(1), optimized=False)
            seen = spread(kept, found.shape, 0) > 0
            seen &= (entry >= plan.first) & (entry < past) & (entry <= spread(last, found.shape, 1))
            found = jnp.where(seen, found, MASKED)
            refs.scores.at[row, head, tile, pl.ds(place, unit.keys)][...] = found
            # powers of 2 from here on: exp2 is one instruction
            found = found * LOG2_E
            new_top = jnp.maximum(top, found.max(axis=0))
            weights = jnp.exp2(found - spread(new_top, found.shape, 1))
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + weights.sum(axis=0)
            acc = unit.shrink_and_add(acc, shrink, refs.v_own, weights.astype(refs.v_own.dtype))
            return step + 1, new_top, total, acc

        targets = (refs.out.at[split, row, head, tile], refs.lse.at[split, row, head, own])
        ring = (refs.filled, refs.emptied, plan.steps)
        attend(unit, count, ring, visit, (refs.out_own, refs.lse_own), targets)

    def sources(step):
        # a page past the end of the split is the last one again, and is masked
        at = begin + step * plan.width
        found = [refs.table[row, jnp.minimum(at + i, end - 1)] for i in range(plan.width)]
        return [x.at[page, head] for x in (refs.k, refs.v) for page in found]

    rings = [
        x.at[:, pl.ds(i * plan.each, plan.each)]
        for x in (refs.k_ring, refs.v_ring)
        for i in range(plan.width)
    ]
    specialise_warps(
        wg,
        unit,
        compute,
        lambda: fetch(count, sources, rings, refs.filled, refs.emptied, plan.steps),
    )


def _stage(source, target, kept=None) -> None:
    """Copies keys or values into the matrix unit's layout.

    kept: (a reference that is 0 for rows that become zeros, the first row that does not, and the
    first that does after it), or None for all rows as they are.
    """
    layout = plgpu.Layout.WGMMA
    for at in range(0, source.shape[0], ROWS):  # few at a time, for the sake of registers
        own = pl.ds(at, ROWS)
        some = plgpu.load(source.at[own], layout=layout, optimized=False)
        if kept is not None:
            row = plgpu.broadcasted_iota(jnp.int32, some.shape, 0, layout=layout) + at
            real = plgpu.load(kept[0].at[own], layout=layout.reduce(1), optimized=False)
            inside = (spread(real, some.shape, 0) > 0) & (row >= kept[1]) & (row < kept[2])
            some = jnp.where(inside, some, jnp.zeros_like(some))
        target.at[own][...] = some
