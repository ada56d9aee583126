"""Attention of few tokens to pages on GPU (Mosaic GPU).

A thread block is one split of the pages of one key/value head. One warpgroup reads the list of
pages and copies them into a ring of buffers in shared memory, several pages to a step. Another
multiplies.

With ``append`` the keys and values of the queries themselves are not in their pages yet. The block
that reads the page of such a key puts it into the copy in shared memory, so that it need not wait
for a write, and writes it to memory when it has read all its pages.

Products are transposed: keys are the rows, and queries times heads are the columns. Matrix units
work on 64 or 128 rows, which the keys of a step fill and the few queries of a group do not.
Ordinary arithmetic is too slow: 16 heads that share a key need 32 multiplications per byte, more
than a device's ordinary units can do at the speed of its memory.

Dimensions: U units, C lists of a unit, K' heads of queries that share keys, R query rows of a head,
K key/value heads, H head size.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matrix_units import KEY_UNITS, LOG2_E, full, spread, tiles
from pallas_kernels.padding import pad
from pallas_kernels.paged.gpu_pages import ROWS, Pages, clean, places_of
from pallas_kernels.paged.lists import GPU_KEYS, TuningConfig, Work, columns
from pallas_kernels.pipeline import barriers, fetch, specialise_warps, visits
from pallas_kernels.tokens import MASKED

DTYPES = ("bfloat16",)
# The devices that the kernels are written for.
TARGETS = ("h100", "h200", "gb200")
ELSEWHERE = "no kernel for this GPU"
# Thread blocks of a cluster that every device can hold.
MAX_CLUSTER = 8
# Rows of a tile of queries in shared memory.
TILE = 8
# Head sizes that are whole products: padding would copy the cache.
HEAD_DIMS = {"hopper": (64, 128), "blackwell": (128,)}


def obstacle(q_shape: tuple[int, ...], pages_shape: tuple[int, ...], on: str) -> str | None:
    """Reason why the kernel cannot run q [B, T, N, H] and pages [pages, K, page, H] of these
    shapes on "hopper" or "blackwell", or None.
    """
    (page, head_dim) = pages_shape[2:]
    if head_dim not in HEAD_DIMS[on]:
        return f"{head_dim=} must be one of {HEAD_DIMS[on]}, the rows of a product"
    return f"{page=} must be a multiple of 8" if page % 8 else None


def merges(tuning: TuningConfig, rows: int) -> bool:
    """True if the kernel merges the splits of R query rows of a head itself: the blocks of several
    splits must be one cluster, and a block must have all rows.
    """
    most = MAX_CLUSTER if tuning.cluster else 1
    return tuning.splits <= most and rows <= columns(rows)


def part(page: int) -> int:
    """Tokens that a copy brings of a page: those of a page, or of a part where a step has fewer.

    A page of 512 tokens, a block of MoBA, comes as four parts of 128, each like a page of its own.
    """
    return math.gcd(page, GPU_KEYS)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static arguments of a kernel."""

    # Tokens of a page of the lists, and how many of these a page in memory has (``part``).
    page: int
    parts: int
    # Pages of a step.
    width: int
    # As in ``Work``.
    splits: int
    pages: int
    numbered: bool
    padded: bool
    # K', and how many of the K' share a list or a key/value head.
    heads: int
    per_list: int
    per_head: int
    # Query rows of a thread block.
    columns: int
    # Slots of the ring: steps in flight at the same time.
    steps: int
    # 1 / sqrt(H).
    scale: float
    interpret: bool
    # Whether the blocks of a head's splits merge their results (``merges``).
    merges: bool
    # Whether the queries' own keys are still to be written, behind q.
    appends: bool
    # A key of ``matrix_units.KEY_UNITS``.
    unit: str

    @property
    def shares(self) -> bool:
        """True if blocks of a cluster pass on their parts of a result."""
        return self.merges and self.splits > 1

    @property
    def alone(self) -> bool:
        """True if blocks write parts of results to memory."""
        return self.shares or not self.merges


def forward(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    work: Work,
    *,
    tuning: TuningConfig,
    new: tuple[jax.Array, jax.Array] | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [U, K', R, H] to pages [pages, K, page, H], each split by itself.

    work: of parts of pages (``part``, ``lists.divided``).
    new: the key and the value of the last place that a unit sees, [U, K, H] each, which are written
      into the pages; None where they are there. With them K' is K, and the pages are references.

    Returns (out [splits, U, K', R, H], lse [splits, U, K', R]) in float32, or with ``merges``
    (out [U, K', R, H] in q's dtype, lse [U, K', R]). The result of a query that sees nothing by
    ``work.bounds`` is 0 and -inf.
    """
    (units, heads, rows, head_dim) = q.shape
    (_, kv_heads, stored, _) = k_pages.shape
    page = part(stored)
    unit = KEY_UNITS[tuning.matrix_unit]
    if tuning.keys != unit.keys:
        raise ValueError(
            f"keys={tuning.keys} of a step must be {unit.keys} for {tuning.matrix_unit}"
        )
    plan = _Plan(
        page=page,
        parts=stored // page,
        width=tuning.keys // page,
        splits=work.splits,
        pages=work.pages,
        numbered=work.numbered,
        padded=work.padded,
        heads=heads,
        per_list=heads // work.lists.shape[1],
        per_head=heads // kv_heads,
        columns=columns(rows),
        steps=tuning.steps,
        scale=head_dim**-0.5,
        interpret=bool(interpret),
        merges=merges(tuning, rows),
        appends=new is not None,
        unit=tuning.matrix_unit,
    )
    # the rows are R / Q heads of Q queries each, which repeat the queries' bounds
    bounds = pad(jnp.tile(work.bounds, (1, 1, rows // work.bounds.shape[2])), plan.columns, axis=2)
    q = pad(q, plan.columns, axis=2)
    padded = q.shape[2]
    blocks = padded // plan.columns
    if new is not None:  # one array, so that one kernel makes all that this one reads
        q = pad(jnp.concatenate([q, *(x[:, :, None] for x in new)], axis=2), TILE, axis=2)
    parts = [
        jax.ShapeDtypeStruct(
            (work.splits, units, heads, blocks, head_dim, plan.columns), jnp.float32
        ),
        jax.ShapeDtypeStruct((work.splits, units, heads, padded), jnp.float32),
    ]
    whole = [
        jax.ShapeDtypeStruct((units, heads, rows, head_dim), q.dtype),
        jax.ShapeDtypeStruct((units, heads, padded), jnp.float32),
    ]
    # the grid of thread blocks, in which the last axis is that of clusters
    axes = {"tile": blocks, "part": units * heads, "split": work.splits}
    if not plan.merges:
        axes = {"tile": blocks, "split": work.splits, "part": units * heads}
    clusters = 1 if plan.merges else 0
    results = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        kernel_name="selected_paged_attention" if work.numbered else "paged_attention",
        out_type=(whole if plan.merges else []) + (parts if plan.alone else []),
        scratch_types=[
            tiles((plan.columns, head_dim), q.dtype),
            tiles((plan.steps, tuning.keys, head_dim), k_pages.dtype),
            tiles((plan.steps, tuning.keys, head_dim), v_pages.dtype),
            plgpu.SMEM((head_dim, plan.columns), jnp.float32),
            plgpu.SMEM((plan.columns,), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + plan.appends),
            *barriers(plan.steps, unit.compute, arrays=2 * plan.width),
            *([plgpu.SMEM((2, head_dim), q.dtype)] if plan.appends else []),
            *([plgpu.SMEM((plan.columns, head_dim), q.dtype)] if plan.merges else []),
            *([plgpu.ClusterBarrier(collective_axes=("split",))] if plan.shares else []),
            *unit.scratch(plan.columns, head_dim, q.dtype),
        ],
        grid=tuple(axes.values())[: len(axes) - clusters],
        grid_names=tuple(axes)[: len(axes) - clusters],
        cluster=tuple(axes.values())[len(axes) - clusters :],
        cluster_names=tuple(axes)[len(axes) - clusters :],
        num_threads=unit.compute + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
    )(work.lists, work.spans, bounds, q, k_pages, v_pages)
    if plan.merges:
        return results[0], results[1][:, :, :rows]
    out, lse = results
    out = out.swapaxes(-1, -2).reshape(work.splits, units, heads, padded, head_dim)
    return out[:, :, :, :rows], lse[:, :, :, :rows]


def _kernel(lists, spans, bounds, q, k, v, *refs, plan: _Plan):
    whole, refs = (refs[:2], refs[2:]) if plan.merges else (None, refs)
    parts, refs = (refs[:2], refs[2:]) if plan.alone else (None, refs)
    q_own, k_ring, v_ring, out_own, lse_own, loaded, filled, emptied, *refs = refs
    new, *refs = refs if plan.appends else (None, *refs)
    rows_own, *refs = refs if plan.merges else (None, *refs)
    met, *refs = refs if plan.shares else (None, *refs)
    tile, part, wg = (jax.lax.axis_index(name) for name in ("tile", "part", "wg"))
    # a part is one of the K' heads of one unit
    at = jax.lax.div(part, plan.heads)
    head = jax.lax.rem(part, plan.heads)
    unit = KEY_UNITS[plan.unit](refs, plan.interpret)
    pages = Pages(lists, at, jax.lax.div(head, plan.per_list), plan)
    count = jax.lax.div(pages.end - pages.begin + (plan.width - 1), plan.width)
    own = pl.ds(tile * plan.columns, plan.columns)

    def compute():
        plgpu.copy_gmem_to_smem(q.at[at, head, own], q_own, loaded)
        if plan.appends:
            behind = pl.ds(q.shape[2] - TILE, 2)
            plgpu.copy_gmem_to_smem(q.at[at, head, behind], new, loaded)
        first, last = (
            plgpu.load(bounds.at[at, i, own], layout=unit.layout.reduce(0), optimized=False)
            for i in range(2)
        )
        plgpu.barrier_wait(loaded)

        def visit(slot, carry):
            step, top, total, acc = carry
            if plan.appends:
                _insert(pages, step, (k_ring.at[slot], v_ring.at[slot]), new, spans[at, 3], plan)
            scores = unit.product(k_ring.at[slot], q_own.transpose((1, 0))) * (plan.scale * LOG2_E)
            line = unit.layout.reduce(1)
            places = spread(places_of(pages, step, 0, unit.keys, line, plan), scores.shape, 0)
            seen = (places >= spread(first, places.shape, 1)) & (
                places <= spread(last, places.shape, 1)
            )
            scores = jnp.where(seen, scores, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=0))
            weights = jnp.exp2(scores - spread(new_top, scores.shape, 1))
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + weights.sum(axis=0)
            # before the product: a weight of 0 times a value that is not finite would be NaN
            clean(pages, step, v_ring.at[slot], spans, at, plan)
            acc = unit.shrink_and_add(acc, shrink, v_ring.at[slot], weights.astype(v_ring.dtype))
            return step + 1, new_top, total, acc

        number = jax.lax.axis_index("split")
        ring = (filled, emptied, plan.steps)
        buffers = (out_own, lse_own)
        found = _go(unit, count, ring, visit, buffers)
        if plan.alone:
            each = (parts[0].at[:, at, head, tile], parts[1].at[:, at, head, own])
            _leave(found, buffers, [x.at[number] for x in each])
        if plan.merges:
            targets = (whole[0].at[at, head], whole[1].at[at, head])
            finish = functools.partial(_finish, unit, (rows_own, lse_own), targets)
        if plan.shares:
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

            @pl.when(number == 0)
            def _():
                finish(_merged(unit, each, plan.splits))

        elif plan.merges:
            finish(found)
        if plan.appends:
            _append(pages, (k, v), head, new, (tile == 0) & (spans[at, 3] >= 0), spans[at, 3], plan)

    def sources(step):
        kv_head = jax.lax.div(head, plan.per_head)
        return [page for x in (k, v) for page in pages.copied(step, x, kv_head)]

    rings = [
        x.at[:, pl.ds(i * plan.page, plan.page)]
        for x in (k_ring, v_ring)
        for i in range(plan.width)
    ]
    specialise_warps(
        wg, unit, compute, lambda: fetch(count, sources, rings, filled, emptied, plan.steps)
    )


def attend(unit, count, ring, visit, buffers, targets) -> None:
    """Goes through the steps of a split, and writes what its queries get from it.

    ring: (filled, emptied, number of buffers), as of ``pipeline.visits``. visit: a function from
    the slot of a step and (step, highest score, sum of weights, sum of weighted values) to the
    latter with the step's keys; the highest score is a logarithm to base 2. buffers: (out [H,
    columns], lse [columns]) in shared memory. targets: the same in HBM.
    """
    _leave(_go(unit, count, ring, visit, buffers), buffers, targets)


def _go(unit, count, ring, visit, buffers):
    """The first half of ``attend``: (out [H, columns], lse [columns]) in registers."""
    filled, emptied, steps = ring
    out, lse = buffers
    line = unit.layout.reduce(0)
    # above MASKED, so that a masked score weighs nothing even before a visible key was met
    start = (
        jnp.int32(0),
        full(lse.shape, MASKED / 2, line),
        full(lse.shape, 0, line),
        full(out.shape, 0, unit.layout),
    )
    _, top, total, acc = visits(0, count, filled, emptied, visit, start, steps)
    nothing = total == 0.0
    divisor = jnp.where(nothing, 1.0, total)
    lses = jnp.where(nothing, -jnp.inf, (top + jnp.log2(divisor)) * (1 / LOG2_E))
    return acc / spread(divisor, acc.shape, 1), lses


def _leave(found, buffers, targets) -> None:
    """The second half of ``attend``: writes what is found, over shared memory."""
    for x, buffer in zip(found, buffers, strict=True):
        buffer[...] = x
    plgpu.commit_smem()
    for buffer, target in zip(buffers, targets, strict=True):
        plgpu.copy_smem_to_gmem(buffer, target)
    plgpu.wait_smem_to_gmem(0)


def _merged(unit, parts, splits: int):
    """(out [H, columns], lse [columns]) of all splits from those of each in HBM, as
    ``softmax.merge``.
    """
    outs, lses = parts
    line = unit.layout.reduce(0)
    each = [plgpu.load(lses.at[i], layout=line, optimized=False) for i in range(splits)]
    top = functools.reduce(jnp.maximum, each)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = [jnp.exp2((x - top) * LOG2_E) for x in each]
    total = functools.reduce(jnp.add, weights)
    nothing = total == 0.0
    divisor = jnp.where(nothing, 1.0, total)
    out = full(outs.shape[1:], 0, unit.layout)
    for i, weight in enumerate(weights):
        own = plgpu.load(outs.at[i], layout=unit.layout, optimized=False)
        out += own * spread(weight / divisor, own.shape, 1)
    return out, jnp.where(nothing, -jnp.inf, top + jnp.log2(divisor) * (1 / LOG2_E))


def _finish(unit, buffers, targets, found) -> None:
    """Writes (out [H, columns], lse [columns]) as rows of queries, in their dtype."""
    rows, lse = buffers
    target, lse_target = targets
    out = found[0].astype(rows.dtype)
    if unit.interpret:
        rows[...] = out.T
    else:
        rows.transpose((1, 0))[...] = plgpu.layout_cast(out, unit.transposed)
    lse[...] = found[1]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(rows.at[pl.ds(0, target.shape[0])], target)
    plgpu.copy_smem_to_gmem(lse, lse_target)
    plgpu.wait_smem_to_gmem(0)


def _insert(pages: Pages, step, buffers, new, place, plan: _Plan) -> None:
    """Puts the unit's own key and value into a step's keys and values in shared memory, if the step
    has their place.
    """
    layout = plgpu.Layout.WGMMA
    number = jax.lax.div(place, plan.page) - pages.begin - step * plan.width

    @pl.when((place >= 0) & (number >= 0) & (number < plan.width))
    def _():
        for i, buffer in enumerate(buffers):
            row = plgpu.load(new.at[i], layout=layout.reduce(0), optimized=False)
            for first in range(0, buffer.shape[0], ROWS):  # as in ``clean``
                some = buffer.at[pl.ds(first, ROWS)]
                line = layout.reduce(1)
                at = spread(places_of(pages, step, first, ROWS, line, plan), some.shape, 0)
                held = plgpu.load(some, layout=layout)
                some[...] = jnp.where(at == place, spread(row, some.shape, 1), held)
        plgpu.commit_smem()


def _append(pages: Pages, stored, head, new, mine, place, plan: _Plan) -> None:
    """Writes the unit's own key and value to their place in memory, if it is in a page of this
    split. ``mine``: False where another block writes them.
    """
    number = jax.lax.div(place, plan.page) - pages.begin
    mine &= (number >= 0) & (number < pages.end - pages.begin)

    @pl.when(mine)
    def _():
        page = pages.page(number)

        @pl.when(page >= 0)
        def _():
            where = jax.lax.div(page, plan.parts)
            part = jax.lax.rem(page, plan.parts)
            offset = part * plan.page + jax.lax.rem(place, plan.page)
            for i, x in enumerate(stored):
                plgpu.copy_smem_to_gmem(new.at[i], x.at[where, head, offset])
            plgpu.wait_smem_to_gmem(0)
