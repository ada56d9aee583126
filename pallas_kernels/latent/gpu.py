"""Attention of few tokens to pages of latent vectors on Hopper (Mosaic GPU).

A thread block has 64 query rows, each a head of a token, and one split of the row's pages. One
warpgroup copies the vectors of a step into a ring in shared memory, where they are keys and values
at once. Two others multiply. Each has the scores of one half of a step's keys, and one half of the
elements of the results: so the products are done once, and the highest scores and the weights of
both pass through shared memory.

By arithmetic, for vectors of 576 numbers, of which 512 are the value: a token is 1,152 bytes, and
2 * 64 * (576 + 512) = 139 thousand operations for a thread block, 121 a byte. An H100 does 295 for
a byte of its memory. So up to 64 heads, as on two devices for DeepSeek-V3, are bound by memory, and
128, for which two blocks read a token, nearly as much by products. Shared memory has the queries
(72 KiB), two slots of the ring (144 KiB) and the weights (8 KiB).

Dimensions: U units, R query rows of a unit, E elements of a vector, V of them the value.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matrix_units import LOG2_E, SWIZZLE, Wgmma, full, spread, tiles
from pallas_kernels.padding import pad
from pallas_kernels.paged.gpu_pages import ROWS, Pages, clean, places_of
from pallas_kernels.paged.lists import TuningConfig, Work
from pallas_kernels.pipeline import barriers, fetch, specialise_warps, visits
from pallas_kernels.tokens import MASKED

DTYPES = ("bfloat16",)
# The devices that the kernel is written for.
TARGETS = ("h100", "h200")
ELSEWHERE = "no kernel for this GPU"
# Keys of a step, and those of a warpgroup.
KEYS = 64
HALF = KEYS // Wgmma.compute
# Elements of a vector are whole rows of shared memory; a product has at most 256 columns.
LANES = SWIZZLE // 2
MOST_VALUE = 2 * 256
# Bytes of shared memory that a thread block may have, less those of barriers.
MEMORY = 227 * 1024 - 512


def memory(size: int) -> int:
    """Bytes of shared memory of vectors of E elements."""
    vectors = (ROWS + 2 * KEYS) * size * 2
    return vectors + ROWS * KEYS * 2 + (Wgmma.compute + 1) * ROWS * 4


def obstacle(
    q_shape: tuple[int, ...], pages_shape: tuple[int, ...], rank: int, on: str
) -> str | None:
    """Reason why the kernel cannot run q [B, T, N, E] and pages [pages, 1, page, E] of which
    ``rank`` elements are the value, or None.
    """
    page, size = pages_shape[2:]
    if on != "hopper":
        return ELSEWHERE
    if size % LANES or rank % (2 * LANES):
        return f"vectors of {size}, {rank} the value, must be multiples of {LANES}, {2 * LANES}"
    if rank > MOST_VALUE or memory(size) > MEMORY:
        return f"vectors of {size}, {rank} the value, do not fit the shared memory"
    return f"{page=} must be a multiple of 8" if page % 8 else None


def part(page: int) -> int:
    """Tokens that a copy brings of a page: those of a page, or of a part of one."""
    return math.gcd(page, KEYS)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static arguments of the kernel."""

    # Tokens of a page of the lists, and how many of these a page in memory has (``part``).
    page: int
    parts: int
    # Pages of a step.
    width: int
    # As in ``Work``.
    splits: int
    pages: int
    padded: bool
    # V.
    rank: int
    # Slots of the ring.
    steps: int
    # 1 / sqrt(E).
    scale: float
    interpret: bool
    # A list has all pages of its row.
    numbered: bool = False

    @property
    def share(self) -> int:
        """Elements of the results that a warpgroup has."""
        return self.rank // Wgmma.compute


def forward(
    q: jax.Array,
    pages: jax.Array,
    rank: int,
    work: Work,
    *,
    tuning: TuningConfig,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [U, 1, R, E] to pages [pages, 1, page, E], each split by itself.

    work: of parts of pages (``part``, ``lists.divided``), a list for each unit.

    Returns (out [splits, U, 1, R, rank], lse [splits, U, 1, R]) in float32. The result of a query
    that sees nothing by ``work.bounds`` is 0 and -inf.
    """
    units, _, rows, size = q.shape
    stored = pages.shape[2]
    page = part(stored)
    if tuning.keys != KEYS:
        raise ValueError(f"keys={tuning.keys} of a step must be {KEYS}")
    plan = _Plan(
        page=page,
        parts=stored // page,
        width=KEYS // page,
        splits=work.splits,
        pages=work.pages,
        padded=work.padded,
        rank=rank,
        steps=tuning.steps,
        scale=size**-0.5,
        interpret=bool(interpret),
    )
    # the rows are R / Q heads of Q queries each, which repeat the queries' bounds
    bounds = pad(jnp.tile(work.bounds, (1, 1, rows // work.bounds.shape[2])), ROWS, axis=2)
    q = pad(q[:, 0], ROWS, axis=1)
    padded = q.shape[1]
    out, lse = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        kernel_name="latent_attention",
        out_type=[
            jax.ShapeDtypeStruct((work.splits, units, padded, rank), jnp.float32),
            jax.ShapeDtypeStruct((work.splits, units, padded), jnp.float32),
        ],
        scratch_types=[
            tiles((ROWS, size), q.dtype),
            tiles((plan.steps, KEYS, size), pages.dtype),
            plgpu.SMEM((ROWS, KEYS), pages.dtype),
            plgpu.SMEM((Wgmma.compute, ROWS), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=Wgmma.compute),
            *barriers(plan.steps, Wgmma.compute, arrays=plan.width),
        ],
        grid=(padded // ROWS, work.splits, units),
        grid_names=("tile", "split", "unit"),
        num_threads=Wgmma.compute + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret or None,
    )(work.lists, work.spans, bounds, q, pages)
    return out[:, :, None, :rows], lse[:, :, None, :rows]


def _kernel(lists, spans, bounds, q, kept, out, lse, *refs, plan: _Plan):
    q_own, ring, weights_own, sums_own, lse_own, loaded, met, filled, emptied = refs
    tile, split, at, wg = (jax.lax.axis_index(name) for name in ("tile", "split", "unit", "wg"))
    unit = Wgmma((), plan.share, plan.interpret)
    pages = Pages(lists, at, 0, plan)
    count = jax.lax.div(pages.end - pages.begin + (plan.width - 1), plan.width)
    own = pl.ds(tile * ROWS, ROWS)

    def meet():
        """Waits for the other warpgroup, after which each sees what both have written."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)

    def compute(mine: int):
        """The work of a warpgroup, with its half of the keys and of the values."""

        @pl.when(mine == 0)
        def _():
            plgpu.copy_gmem_to_smem(q.at[at, own], q_own, loaded)

        plgpu.barrier_wait(loaded)
        column, line = unit.layout.reduce(1), unit.layout.reduce(0)
        first, last = (
            plgpu.load(bounds.at[at, i, own], layout=column, optimized=False) for i in range(2)
        )
        keys = pl.ds(mine * HALF, HALF)
        values = mine * plan.share

        def both(reduce, x):
            """The vectors [rows] of both warpgroups as one."""
            sums_own.at[mine][...] = x
            meet()
            return reduce(
                *(plgpu.load(sums_own.at[i], layout=column, optimized=False) for i in range(2))
            )

        def visit(slot, carry):
            step, top, total, acc = carry
            vectors = ring.at[slot]
            scores = unit.product(q_own, vectors.at[keys].transpose((1, 0)))
            scores = scores * (plan.scale * LOG2_E)
            places = places_of(pages, step, mine * HALF, HALF, line, plan)
            places = spread(places, scores.shape, 1)
            seen = (places >= spread(first, scores.shape, 0)) & (
                places <= spread(last, scores.shape, 0)
            )
            scores = jnp.where(seen, scores, MASKED)
            new_top = jnp.maximum(top, both(jnp.maximum, scores.max(axis=1)))
            weights = jnp.exp2(scores - spread(new_top, scores.shape, 0))
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + weights.sum(axis=1)
            weights_own.at[:, keys][...] = weights.astype(weights_own.dtype)
            # before the product: a weight of 0 times a value that is not finite would be NaN
            for start in range(values, values + plan.share, LANES):
                clean(pages, step, vectors.at[:, pl.ds(start, LANES)], spans, at, plan)
            meet()
            weights = plgpu.load(weights_own, layout=unit.layout, optimized=False)
            value = vectors.at[:, pl.ds(values, plan.share)]
            return step + 1, new_top, total, unit.shrink_and_add(acc, shrink, weights, value)

        # above MASKED, so that a masked score weighs nothing even before a visible key was met
        start = (
            jnp.int32(0),
            full((ROWS,), MASKED / 2, column),
            full((ROWS,), 0, column),
            unit.zero(0),
        )
        _, top, total, acc = visits(0, count, filled, emptied, visit, start, plan.steps)
        total = both(jnp.add, total)
        nothing = total == 0.0
        divisor = jnp.where(nothing, 1.0, total)
        target = out.at[split, at, own, pl.ds(values, plan.share)]
        target[...] = acc / spread(divisor, acc.shape, 0)

        @pl.when(mine == 0)
        def _():
            lse_own[...] = jnp.where(nothing, -jnp.inf, (top + jnp.log2(divisor)) * (1 / LOG2_E))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(lse_own, lse.at[split, at, own])
            plgpu.wait_smem_to_gmem(0)

    def computes():
        for mine in range(Wgmma.compute):
            pl.when(wg == mine)(functools.partial(compute, mine))

    def sources(step):
        return pages.copied(step, kept, 0)

    rings = [ring.at[:, pl.ds(i * plan.page, plan.page)] for i in range(plan.width)]
    specialise_warps(
        wg, unit, computes, lambda: fetch(count, sources, rings, filled, emptied, plan.steps)
    )
