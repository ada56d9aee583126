"""Attention of few tokens to pages on TPU (Mosaic).

A grid step is one part: a split of one list of pages, with all the query heads that share the list.
Where a row attends to all its pages, a part reads whole pages with every key/value head, which lie
in one piece. Where pages are picked, it reads one head of each.

A part goes through its pages several at a time, while the next ones are fetched into the other of
two buffers. At the end of its own list it starts to fetch the first pages of the next part. Short
lists then follow each other without a pause. Splits may run on different cores; the parts of a
split run one after another on the same core.

Dimensions: U units, C lists of a unit, n pages of a list, K' heads of queries that share keys, R
query rows of a head, K key/value heads, H head size.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash.tpu import VMEM_LIMIT, dot, estimate
from pallas_kernels.padding import pad
from pallas_kernels.paged.lists import TuningConfig, Work, cost
from pallas_kernels.tokens import MASKED

DTYPES = ("float32", "bfloat16")
# The devices that the kernels are written for.
TARGETS = ("v5e", "v5p", "v6e")
ELSEWHERE = "no kernel for this TPU"
# Most query rows of a key/value head whose scores fit a grid step.
MAX_ROWS = 256
# Rows of a tile of bfloat16, the narrowest of DTYPES.
SUBLANES = 16


def obstacle(q_shape: tuple[int, ...], pages_shape: tuple[int, ...], on: str) -> str | None:
    """Reason why the kernel cannot run q [B, T, N, H] and pages [pages, K, page, H] of these
    shapes, or None.

    on: the device, which makes no difference among TPUs.
    """
    _, kv_heads, page, _ = pages_shape
    if page % SUBLANES:
        return f"{page=} must be a multiple of {SUBLANES}"
    rows = q_shape[1] * q_shape[2] // kv_heads
    if rows > MAX_ROWS:
        return f"{rows} query rows share a key/value head, more than {MAX_ROWS}"
    return None


def part(page: int) -> int:
    """Tokens that a copy brings of a page: all of them."""
    return page


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static arguments of a kernel."""

    # Tokens of a page.
    page: int
    # Pages of a step.
    width: int
    # As in ``Work``.
    splits: int
    pages: int
    numbered: bool
    padded: bool
    # C.
    lists: int
    # How many of the K' heads share a list, and how many a key/value head.
    heads: int
    per_head: int
    # 1 / sqrt(H).
    scale: float


def forward(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    work: Work,
    *,
    tuning: TuningConfig,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [U, K', R, H] to pages [pages, K, page, H], each split by itself.

    v_pages: None where the keys are the values too, which are then read once.

    Returns (out [splits, U, K', R, H], lse [splits, U, K', R]) in float32.
    The results of a query that sees nothing by ``work.bounds`` mean nothing.
    """
    (units, heads, rows, head_dim) = q.shape
    (_, kv_heads, page, _) = k_pages.shape
    lists = work.lists.shape[1]
    splits = work.splits
    plan = _Plan(
        page=page,
        width=tuning.keys // page,
        splits=splits,
        pages=work.pages,
        numbered=work.numbered,
        padded=work.padded,
        lists=lists,
        heads=heads // lists,
        per_head=heads // kv_heads,
        scale=head_dim**-0.5,
    )
    # the rows are R / Q heads of Q queries each, which repeat the queries' bounds
    bounds = jnp.tile(work.bounds, (1, 1, rows // work.bounds.shape[2]))
    q = pad(q, SUBLANES, axis=2)
    bounds = pad(bounds, SUBLANES, axis=2).swapaxes(1, 2)
    padded = q.shape[2]
    last = units * lists - 1

    # (unit, list) of a part
    def part(i):
        return jax.lax.div(i, lists), jax.lax.rem(i, lists)

    # The list of a part, or of the one after it. The last part sees its own list twice; the kernel
    # knows by the part's number that nothing follows.
    def scalars(ahead: int):
        length = work.lists.shape[2]
        at = lambda s, i: (*part(jnp.minimum(i + ahead, last)), 0, 0)  # noqa: E731
        return pl.BlockSpec((1, 1, 1, length), at, memory_space=pltpu.SMEM)

    results = lambda s, i: (s, *part(i), 0, 0)  # noqa: E731
    stored = [k_pages] if v_pages is None else [k_pages, v_pages]
    lists_of_parts = work.lists[:, :, None]
    out, lse = pl.pallas_call(
        functools.partial(_kernel, plan=plan, arrays=len(stored)),
        grid=(splits, units * lists),
        in_specs=[
            scalars(0),
            scalars(1),
            pl.BlockSpec((1, 1, 1, 4), lambda s, i: (part(i)[0], 0, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((1, padded, 2), lambda s, i: (part(i)[0], 0, 0)),
            pl.BlockSpec((1, plan.heads, padded, head_dim), lambda s, i: (*part(i), 0, 0)),
            *[pl.BlockSpec(memory_space=pl.ANY)] * len(stored),
        ],
        out_specs=[
            pl.BlockSpec((1, 1, plan.heads, padded, head_dim), results),
            pl.BlockSpec((1, 1, plan.heads, padded, 1), results),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, units, heads, padded, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((splits, units, heads, padded, 1), jnp.float32),
        ],
        scratch_shapes=[
            *[pltpu.VMEM((2, plan.heads, tuning.keys, head_dim), x.dtype) for x in stored],
            pltpu.VMEM((plan.heads, padded, 1), jnp.float32),
            pltpu.VMEM((plan.heads, padded, 1), jnp.float32),
            pltpu.VMEM((plan.heads, padded, head_dim), jnp.float32),
            # steps of all parts before, which outlives a grid step
            pltpu.SMEM((1,), jnp.int32),
            # by buffer; keys or values; and page of a step
            pltpu.SemaphoreType.DMA((2, len(stored), plan.width)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
        cost_estimate=estimate(cost(q.shape, work.pages * page, k_pages.dtype.itemsize, splits)),
        name="selected_paged_attention" if work.numbered else "paged_attention",
    )(
        lists_of_parts,
        lists_of_parts,
        work.spans[:, None, None],
        bounds,
        q,
        *stored,
    )
    return out[:, :, :, :rows], lse[:, :, :, :rows, 0]


# --- Kernel ---------------------------------------------------------------------------------------


def _kernel(own, following, spans, bounds, q, *refs, plan: _Plan, arrays: int):
    stored, (out, lse), refs = refs[:arrays], refs[arrays : arrays + 2], refs[arrays + 2 :]
    buffers, (top, total, acc, done, semaphores) = refs[:arrays], refs[arrays:]
    k_two, v_two = buffers[0], buffers[-1]
    split = pl.program_id(0)
    part = pl.program_id(1)
    # above MASKED, so that a masked score weighs nothing even before a visible key was met
    top[...] = jnp.full(top.shape, MASKED / 2, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    acc[...] = jnp.zeros(acc.shape, jnp.float32)
    fetch = functools.partial(
        _fetch,
        split=split,
        pairs=tuple(zip(stored, buffers, strict=True)),
        semaphores=semaphores,
        plan=plan,
    )
    # steps of this part, and of the next one
    steps = _steps(own, split, plan)
    after = jnp.where(part + 1 < pl.num_programs(1), _steps(following, split, plan), 0)

    @pl.when(part == 0)
    def _():
        done[0] = 0
        pl.when(steps > 0)(lambda: fetch(own, part, 0, 0, "start"))

    # The two buffers alternate over the steps of all parts, not of each: the part before has
    # started the copies of this part's first step into buffer ``first`` % 2.
    first = done[0]

    # a part without pages must still start the copies of the next one
    @pl.when((steps == 0) & (after > 0))
    def _():
        fetch(following, part + 1, 0, jax.lax.rem(first, 2), "start")

    @pl.loop(0, steps)
    def _(step):
        slot = jax.lax.rem(first + step, 2)
        # start the next step's copies, of this part or of the next, before waiting for this one's
        pl.when(step + 1 < steps)(lambda: fetch(own, part, step + 1, 1 - slot, "start"))
        pl.when((step + 1 == steps) & (after > 0))(
            lambda: fetch(following, part + 1, 0, 1 - slot, "start")
        )
        fetch(own, part, step, slot, "wait")
        pages = _Step(own, split, step, plan)
        _visit(pages, slot, spans, bounds, q, k_two, v_two, top, total, acc, plan)

    done[0] = first + steps
    nothing = total[...] == 0
    divisor = jnp.where(nothing, 1.0, total[...])
    out[0, 0] = acc[...] / divisor
    lse[0, 0] = jnp.where(nothing, -jnp.inf, jnp.log(divisor) + top[...])


def _steps(lists, split, plan: _Plan):
    """The steps of a part."""
    pages = lists[0, 0, 0, 2 * split + 1] - lists[0, 0, 0, 2 * split]
    # div, which truncates, is enough for numbers that are not negative
    return jax.lax.div(pages + plan.width - 1, plan.width)


class _Step:
    """The pages of a step, by their index in it, read from the list in scalar memory."""

    def __init__(self, lists, split, step, plan: _Plan):
        self.lists, self.plan = lists, plan
        self.begin = lists[0, 0, 0, 2 * split] + step * plan.width
        self.end = lists[0, 0, 0, 2 * split + 1]

    def page(self, index: int):
        """The number of a page in HBM; negative for a hole and past the end of the split."""
        at = jnp.minimum(self.begin + index, self.plan.pages - 1)
        found = self.lists[0, 0, 0, 2 * self.plan.splits + at]
        return jnp.where(self.begin + index < self.end, found, -1)

    def number(self, index: int):
        """The number of a page in the sequence."""
        if not self.plan.numbered:
            return self.begin + index
        at = jnp.minimum(self.begin + index, self.plan.pages - 1)
        return self.lists[0, 0, 0, 2 * self.plan.splits + self.plan.pages + at]

    def filled(self, index: int):
        """The number of places at the start of a page that hold a token."""
        if not self.plan.padded:
            return self.plan.page
        at = jnp.minimum(self.begin + index, self.plan.pages - 1)
        parts = 2 if self.plan.numbered else 1
        return self.lists[0, 0, 0, 2 * self.plan.splits + parts * self.plan.pages + at]


def _fetch(lists, part, step, slot, action: str, *, split, pairs, semaphores, plan: _Plan) -> None:
    """Starts the copies of a part's step into a slot of the buffers, or waits for them.

    action: "start" or "wait". Both skip the same pages, so that a wait never lacks its copy.
    """
    pages = _Step(lists, split, step, plan)
    # with lists of picks, only the key/value head that the part's list belongs to
    head = pl.ds(jax.lax.div(jax.lax.rem(part, plan.lists), plan.per_head), 1)
    for i in range(plan.width):
        page = pages.page(i)

        @pl.when(page >= 0)
        def _(i=i, page=page):
            for j, (source, buffer) in enumerate(pairs):
                source = source.at[page, head] if plan.lists > 1 else source.at[page]
                target = buffer.at[slot, :, pl.ds(i * plan.page, plan.page)]
                getattr(pltpu.make_async_copy(source, target, semaphores.at[slot, j, i]), action)()


def _visit(
    pages: _Step, slot, spans, bounds, q, k_two, v_two, top, total, acc, plan: _Plan
) -> None:
    """Adds the keys of a step to the running sums of every head."""
    # whether each page is there, and every query sees every place of it
    whole = []
    for i in range(plan.width):
        first = pages.number(i) * plan.page
        inside = (first >= spans[0, 0, 0, 0]) & (first + plan.page - 1 <= spans[0, 0, 0, 1])
        whole.append((pages.page(i) >= 0) & inside & (pages.filled(i) == plan.page))

    def add(masked: bool):
        mask = _mask(pages, bounds, plan) if masked else None
        for head in range(plan.heads):
            scores = dot(q[0, head], k_two[slot, head], ((1,), (1,))) * plan.scale
            if masked:
                scores = jnp.where(mask, scores, MASKED)
            new_top = jnp.maximum(top[head], jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp(scores - new_top)
            shrink = jnp.exp(top[head] - new_top)
            top[head] = new_top
            total[head] = total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            weights = weights.astype(v_two.dtype)
            acc[head] = acc[head] * shrink + dot(weights, v_two[slot, head], ((1,), (0,)))

    everything = functools.reduce(jnp.logical_and, whole)
    pl.when(everything)(lambda: add(False))

    @pl.when(~everything)
    def _():
        for i in range(plan.width):
            pl.when(~whole[i])(functools.partial(_clean, pages, i, slot, spans, v_two, plan))
        add(True)


def _mask(pages: _Step, bounds, plan: _Plan):
    """bool [R, keys]: which query row sees which key of a step."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, plan.width * plan.page), 1)
    # the place of each key, -1 where there is no page or padding, which no query sees
    place = jnp.full(lane.shape, -1, jnp.int32)
    for i in range(plan.width):
        end = i * plan.page + pages.filled(i)
        here = (lane >= i * plan.page) & (lane < end) & (pages.page(i) >= 0)
        place = jnp.where(here, lane + (pages.number(i) - i) * plan.page, place)
    return (place >= bounds[0, :, 0:1]) & (place <= bounds[0, :, 1:2])


def _clean(pages: _Step, index: int, slot, spans, v_two, plan: _Plan) -> None:
    """Writes zeros over the values of a page that no query sees.

    Such values may not be finite, and 0 times them would be NaN.
    """
    rows = pl.ds(index * plan.page, plan.page)
    offset = jax.lax.broadcasted_iota(jnp.int32, (plan.page, 1), 0)
    place = pages.number(index) * plan.page + offset
    seen = (place >= spans[0, 0, 0, 2]) & (place <= spans[0, 0, 0, 3]) & (pages.page(index) >= 0)
    seen &= offset < pages.filled(index)
    for head in range(plan.heads):
        values = v_two[slot, head, rows]
        v_two[slot, head, rows] = jnp.where(seen, values, jnp.zeros_like(values))
