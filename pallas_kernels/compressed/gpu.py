"""The picks of compressed attention on GPU (Mosaic GPU).

A thread block picks for one block of queries and one key/value head. It goes through the tiles of
blocks that the queries may see. Its warpgroups have two roles:

- One warpgroup copies. It brings the keys of a tile once, and then the queries of each head of the
  group, one head after another. A part of the next tile's keys is copied as soon as the last head
  has used the same part of the tile before.
- The others compute. They sum the probabilities over the heads in registers, and then merge the
  scores of the tile's blocks into the best blocks so far, which are in registers too.

Dimensions: as in ``blocks``; G query heads of a key/value head, W width of the list of picks.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compressed.blocks import (
    FORCED,
    NOTHING,
    UNSEEN,
    Selection,
    TuningConfig,
    arrange,
    edges,
)
from pallas_kernels.flash import gpu as flash
from pallas_kernels.flash.blocks import visits
from pallas_kernels.matrix_units import UNITS, full, spread, tiles
from pallas_kernels.padding import pad, pad_tokens
from pallas_kernels.pipeline import barriers, fetch, named, specialise_warps
from pallas_kernels.tokens import MASKED, Tokens

TARGETS = flash.TARGETS
ELSEWHERE = flash.ELSEWHERE
# Parts of a tile of keys that fit in shared memory, and picks that fit in registers.
MAX_PARTS, MAX_PICKS = 8, 32


def obstacle(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], selection: Selection
) -> str | None:
    """Reason why blocks cannot be picked for q [B, T, N, H] by k [B, E, K, H] of these shapes,
    or None.
    """
    if (parts := len(selection.shares)) > MAX_PARTS:
        return f"{parts} stretches share tokens with a block, more than {MAX_PARTS}"
    if selection.picks > MAX_PICKS:
        return f"picks={selection.picks} are more than {MAX_PICKS}"
    return None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static arguments of the kernel."""

    # Queries of a thread block.
    block_q: int
    # Blocks of a tile, C.
    columns: int
    # G.
    groups: int
    # Slots of the ring of queries.
    steps: int
    # 1 / sqrt(H), of the head size before padding.
    scale: float
    interpret: bool
    # The head size with its padding.
    lanes: int
    # A key of ``matrix_units.UNITS``.
    unit: str
    # Parts of a tile, one for each of ``Selection.shares``; stretches that start in a block; and
    # strides of a stretch.
    parts: int
    ratio: int
    reach: int
    # Blocks to pick, at most as many as there are.
    picks: int


def select(
    q: jax.Array,
    k: jax.Array,
    lse: jax.Array,
    q_tokens: Tokens,
    k_tokens: Tokens,
    heads: Tokens,
    shadows: jax.Array | None,
    *,
    selection: Selection,
    ahead: int = 0,
    tuning: TuningConfig,
    interpret=False,
) -> jax.Array:
    """Numbers of the best blocks, int32 [B, T, K, n]; arguments as for ``reference.scores``."""
    length = q.shape[1]
    kv_heads = k.shape[2]
    dtype = q.dtype
    forced = pad(jnp.stack(edges(q_tokens, heads, selection), axis=1), tuning.block_q, axis=2)
    plan = _plan(q, k, selection, tuning, interpret)
    parts = plan.parts
    # arrays in the matrix units' register layouts have a multiple of 8 columns
    width = -(-selection.picks // 8) * 8
    k, k_tokens = arrange(k, k_tokens, heads, shadows, selection, plan.columns, ahead)
    q_tokens = pad_tokens(q_tokens, plan.block_q)
    lists, _ = visits(q_tokens, k_tokens, plan.block_q, plan.columns * (parts + 1), None)
    q_fields = flash.token_rows(q_tokens)
    k_fields = flash.blocked(flash.token_rows(k_tokens), plan.columns)
    sums = pad(jnp.where(jnp.isneginf(lse), NOTHING, lse), plan.block_q).swapaxes(1, 2)
    q = flash.pad_heads(q, plan.block_q)
    k = flash.pad_heads(k, plan.columns)
    (batch, slots) = q.shape[:2]
    unit = UNITS[plan.unit]
    picks = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        kernel_name="compressed_select",
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, slots, width), jnp.int32),
        scratch_types=[
            tiles((plan.steps, plan.block_q, plan.lanes), dtype),
            plgpu.SMEM((plan.steps, plan.block_q), jnp.float32),
            tiles((parts, plan.columns, plan.lanes), dtype),
            plgpu.SMEM((parts + 1, *k_fields.shape[2:]), jnp.int32),
            plgpu.SMEM((unit.compute, unit.tile, width), jnp.int32),
            # of the ring of queries and their lse, of each part of the keys, and of the tokens
            *barriers(plan.steps, unit.compute, arrays=2),
            *barriers(parts, unit.compute, arrays=1),
            *barriers(1, unit.compute, arrays=1),
            *unit.scratch(plan.columns, plan.lanes, 0, dtype),
        ],
        **flash.launch(plan.unit, kv_heads, slots // plan.block_q, batch, interpret),
    )(lists, q, sums, q_fields, forced, k, k_fields)
    return picks[:, :, :length, : selection.picks].swapaxes(1, 2)


# The memory of ``_kernel``.
_Refs = collections.namedtuple(
    "_Refs",
    # In HBM: lists of tiles to visit, queries, their lse and tokens, the blocks that they always
    # take, keys and their tokens.
    "lists q sums q_tok forced k k_tok "
    # In HBM: the result.
    "picks "
    # In shared memory: rings of queries and of their lse, the keys of a tile in parts, and its
    # tokens.
    "q_ring sums_ring k_tile tok_tile "
    # The result before it is copied out.
    "picks_own "
    # Barriers: of the rings, of each part of the keys, and of the tokens.
    "filled emptied k_filled k_emptied tok_filled tok_emptied",
)


def _kernel(*arguments, plan: _Plan):
    refs, scratch = named(_Refs, arguments)
    row, head, block, wg = (jax.lax.axis_index(name) for name in ("row", "head", "block", "wg"))
    unit = UNITS[plan.unit](scratch, plan.lanes, plan.interpret)
    count = refs.lists[row, block, 0]
    whole = refs.lists[row, block, 1]
    sources, after = _sources(refs, plan)
    rings = (refs.q_ring, refs.sums_ring)

    def copy():
        steps = count * plan.groups
        fetch(steps, sources, rings, refs.filled, refs.emptied, plan.steps, after=after)

        # ``fetch`` waits for its own ring only. The thread block must not end while the last tile's
        # keys and tokens are still read.
        @pl.when(count > 0)
        def _():
            plgpu.barrier_wait(refs.tok_emptied.at[0])
            for part in range(plan.parts):
                plgpu.barrier_wait(refs.k_emptied.at[part])

    own = (row, head, block, wg)
    specialise_warps(wg, unit, lambda: _compute(refs, unit, plan, own, count, whole), copy)


def _compute(refs: _Refs, unit, plan: _Plan, at, count, whole) -> None:
    """The work of a warpgroup that computes: the best blocks of its queries.

    at: (row, head, block, warpgroup). count: tiles to visit, of which the first ``whole`` need no
    mask.
    """
    row, head, block, wg = at
    column = unit.layout.reduce(1)
    line = unit.layout.reduce(0)
    rows = pl.ds(wg * unit.tile, unit.tile)
    own = pl.ds(block * plan.block_q + wg * unit.tile, unit.tile)
    queries = flash.load_fields(refs.q_tok.at[row, :, own], column)
    early, late = (
        plgpu.load(refs.forced.at[row, i, own], layout=column, optimized=False) for i in range(2)
    )

    def visit(step, best, masked):
        plgpu.barrier_wait(refs.tok_filled.at[0])
        seeing = queries if masked else None
        total = _total(refs, unit, plan, step, rows, seeing)
        heads = flash.load_fields(refs.tok_tile.at[0], line)
        ranked = _rank(total, heads, early, late, seeing)
        _release(refs.tok_emptied.at[0])
        numbers = plgpu.broadcasted_iota(jnp.int32, total.shape, 1, layout=unit.layout)
        numbers += refs.lists[row, block, 2 + step] * plan.columns
        return _merge(best, ranked, numbers, unit.layout, plan.picks)

    # (scores, numbers) of the best blocks so far, at first none
    listed = refs.picks_own.shape[1:]
    best = (
        full(listed, UNSEEN, unit.layout),
        plgpu.layout_cast(jnp.full(listed, -1, jnp.int32), unit.layout),
    )
    best = jax.lax.fori_loop(0, whole, functools.partial(visit, masked=False), best)
    _, numbers = jax.lax.fori_loop(whole, count, functools.partial(visit, masked=True), best)
    refs.picks_own.at[wg][...] = numbers
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.picks_own.at[wg], refs.picks.at[row, head, own])
    plgpu.wait_smem_to_gmem(0)


def _total(refs: _Refs, unit, plan: _Plan, step, rows, queries: Tokens | None):
    """The scores [rows, C] of a tile's blocks, summed over the heads of the group.

    rows: of the warpgroup. queries: their tokens; None where every query sees every key.
    """
    shape = (unit.tile, plan.columns)
    column = unit.layout.reduce(1)
    line = unit.layout.reduce(0)

    def one_head(index, total):
        # the ring runs on from one tile to the next
        slot = jax.lax.rem(step * plan.groups + index, jnp.int32(plan.steps))
        plgpu.barrier_wait(refs.filled.at[slot])
        lse = plgpu.load(refs.sums_ring.at[slot, rows], layout=column, optimized=False)
        lse = spread(lse * flash.LOG2_E, shape, 0)

        # A loop, so that the matrix unit's addresses of a part are worked out when they are
        # needed. Of all parts together they would take 80 registers all the time.
        def one_part(part, total):
            # the keys of a part stay for all heads: the first waits until they are there, and the
            # last lets the next tile's overwrite them
            pl.when(index == 0)(lambda: plgpu.barrier_wait(refs.k_filled.at[part]))
            keys = refs.k_tile.at[part].transpose((1, 0))
            product = unit.product(refs.q_ring.at[slot, rows], keys)
            scores = product * (plan.scale * flash.LOG2_E) - lse
            pl.when(index == plan.groups - 1)(lambda: _release(refs.k_emptied.at[part]))
            if queries is not None:
                tokens = flash.load_fields(refs.tok_tile.at[1 + part], line)
                scores = jnp.where(flash.mask(queries, tokens, shape, 0), scores, MASKED)
            # ``Selection.shares`` of the part
            share = jnp.minimum(part + 1, plan.ratio) - jnp.maximum(part + 1 - plan.reach, 0)
            return total + jnp.exp2(scores) * share.astype(jnp.float32)

        total = jax.lax.fori_loop(0, plan.parts, one_part, total)
        _release(refs.emptied.at[slot])
        return total

    return jax.lax.fori_loop(0, plan.groups, one_head, full(shape, 0.0, unit.layout))


def _sources(refs: _Refs, plan: _Plan):
    """Two functions of a step: what ``fetch`` copies in it, and one that copies the keys besides.

    A step is one head of one visit. The second function does something only in the first step of a
    visit: it copies each part of the tile's keys, as soon as the visit before is done with that
    part.
    """
    row, head, block = (jax.lax.axis_index(name) for name in ("row", "head", "block"))
    groups = jnp.int32(plan.groups)
    parts = plan.parts

    def sources(step):
        own = pl.ds(block * plan.block_q, plan.block_q)
        q_head = head * plan.groups + jax.lax.rem(step, groups)
        return refs.q.at[row, own, q_head], refs.sums.at[row, q_head, own]

    def keys(step):
        visit = jax.lax.div(step, groups)
        at = refs.lists[row, block, 2 + visit]

        @pl.when(jax.lax.rem(step, groups) == 0)
        def _():
            for part in range(parts):
                own = pl.ds((at * parts + part) * plan.columns, plan.columns)
                target = refs.k_tile.at[part]
                ring = (refs.k_filled.at[part], refs.k_emptied.at[part])
                _refill(visit, refs.k.at[row, own, head], target, *ring)
            source = refs.k_tok.at[row, pl.ds(at * (parts + 1), parts + 1)]
            ring = (refs.tok_filled.at[0], refs.tok_emptied.at[0])
            _refill(visit, source, refs.tok_tile, *ring)

    return sources, keys


def _refill(step, source, target, filled, emptied) -> None:
    """Copies what a visit needs over what the visit before used, once that has been released."""

    @pl.when(step > 0)
    def _():
        plgpu.barrier_wait(emptied)

    plgpu.copy_gmem_to_smem(source, target, filled)


def _release(emptied) -> None:
    """Lets the copying warpgroup overwrite a buffer."""
    # what was read by loads may be overwritten by the copy engine only after a fence
    plgpu.commit_smem()
    plgpu.barrier_arrive(emptied)


def _rank(scores, heads: Tokens, early, late, queries: Tokens | None):
    """The scores [rows, C], FORCED for blocks that are always taken, UNSEEN for unseen ones.

    queries: None where every query sees every block, so that no mask is needed.
    """
    order = spread(heads.order, scores.shape, 1)
    always = (order < spread(early, scores.shape, 0)) | (order >= spread(late, scores.shape, 0))
    ranked = jnp.where(always, FORCED, scores)
    return (
        ranked
        if queries is None
        else jnp.where(flash.mask(queries, heads, scores.shape, 0), ranked, UNSEEN)
    )


def _merge(best, scores, numbers, layout, picks: int):
    """The best of two sets of blocks, as (scores, numbers) [rows, W] in falling order.

    best: the one set, (scores, numbers) [rows, W]. scores, numbers: the other, [rows, C] each.
    """
    slots = plgpu.broadcasted_iota(jnp.int32, best[0].shape, 1, layout=layout)
    most = jnp.iinfo(jnp.int32).max

    def pick(index, carry):
        (old, old_numbers), scores, (new, new_numbers) = carry
        top = jnp.maximum(old.max(axis=1), scores.max(axis=1))

        def lowest(x, x_numbers):
            return jnp.where(x == spread(top, x.shape, 0), x_numbers, most).min(axis=1)

        # ties go to the lowest number; the block that is taken is then struck from its set
        number = jnp.minimum(lowest(old, old_numbers), lowest(scores, numbers))
        old = jnp.where(old_numbers == spread(number, old.shape, 0), UNSEEN, old)
        scores = jnp.where(numbers == spread(number, scores.shape, 0), UNSEEN, scores)
        # no block if the best score left is UNSEEN, or NaN: both fail the comparison
        number = jnp.where(top >= 0, number, -1)
        here = slots == index
        new = jnp.where(here, spread(top, new.shape, 0), new)
        return (
            (old, old_numbers),
            scores,
            (new, jnp.where(here, spread(number, new.shape, 0), new_numbers)),
        )

    empty = jnp.full_like(best[0], UNSEEN), jnp.full_like(best[1], -1)
    return jax.lax.fori_loop(0, picks, pick, (best, scores, empty))[2]


def _plan(q, k, selection: Selection, tuning: TuningConfig, interpret) -> _Plan:
    unit = UNITS[tuning.attention.matrix_unit]
    if tuning.block_q != unit.tile * unit.compute:
        raise ValueError(
            f"block_q={tuning.block_q} must be {unit.tile * unit.compute} for "
            f"{tuning.attention.matrix_unit}"
        )
    if tuning.columns % 16:
        raise ValueError(f"columns={tuning.columns} must be a multiple of 16")
    return _Plan(
        block_q=tuning.block_q,
        columns=tuning.columns,
        groups=q.shape[2] // k.shape[2],
        steps=tuning.steps,
        scale=q.shape[3] ** -0.5,
        interpret=bool(interpret),
        lanes=flash.padded(q.shape[3], q.dtype),
        unit=tuning.attention.matrix_unit,
        parts=len(selection.shares),
        ratio=selection.ratio,
        reach=selection.length // selection.stride,
        picks=min(selection.picks, k.shape[1] // selection.ratio),
    )
