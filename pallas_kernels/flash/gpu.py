"""Attention in blocks on GPU (Mosaic GPU), forward and backward, in the order of FlashAttention-2
(2307.08691).

Forward, and for the gradient of queries, a thread block holds one block of queries of one head. Its
warpgroups share out the rows of the block. One more warpgroup copies the listed key blocks, one
after another, into a ring of buffers in shared memory.

For the gradients of keys and values the roles are exchanged. A thread block holds a block of keys
and goes through the query blocks that may see it, for every query head of its key/value head.
Scores are then transposed (keys by queries). Every sum therefore stays in one thread block, and no
two thread blocks add to the same place.

``matrix_units`` multiplies on Hopper and on Blackwell. Head sizes are padded to a multiple of 64.

Dimensions: B rows, T queries, S keys, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash.blocks import TuningConfig, visits
from pallas_kernels.matrix_units import LOG2_E, SWIZZLE, UNITS, full, spread, tiles
from pallas_kernels.padding import pad, pad_tokens
from pallas_kernels.pipeline import barriers, consume, fetch, named, specialise_warps
from pallas_kernels.tokens import MASKED, Tokens, nodes, sees_nodes

DTYPES = ("bfloat16",)
# The devices that the kernels are written for.
TARGETS = ("h100", "h200", "gb200")
ELSEWHERE = "no kernel for this GPU"


def obstacle(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> str | None:
    """Reason why q [B, T, N, H] and k [B, S, K, H] of these shapes cannot be attended, or None."""
    return None if q_shape[3] <= 128 else f"head size {q_shape[3]} is more than 128"


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static arguments of a kernel."""

    # Queries and keys of a block.
    block_q: int
    block_kv: int
    # Query heads of one key/value head.
    groups: int
    # Slots of the ring: blocks that are in flight at the same time.
    steps: int
    # 1 / sqrt(H), of the head size before padding.
    scale: float
    window: int | None
    interpret: bool
    # The head size with its padding.
    lanes: int
    # A key of ``matrix_units.UNITS``.
    unit: str


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_tokens: Tokens,
    k_tokens: Tokens,
    *,
    window: int | None,
    tuning: TuningConfig,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of q [B, T, N, H] over k, v [B, S, K, H].

    Returns (out [B, T, N, H] in v's dtype, lse [B, T, N] float32).
    """
    shape = q.shape
    dtype = v.dtype
    plan = _plan(q, k, "block_q", "block_kv", tuning, window, interpret)
    q_tokens = pad_tokens(q_tokens, plan.block_q)
    k_tokens = pad_tokens(k_tokens, plan.block_kv)
    lists, _ = visits(q_tokens, k_tokens, plan.block_q, plan.block_kv, window)
    q_fields = token_rows(q_tokens)
    k_fields = blocked(token_rows(k_tokens), plan.block_kv)
    q = pad_heads(q, plan.block_q)
    k = pad_heads(k, plan.block_kv)
    v = pad_heads(v, plan.block_kv)
    batch, length, heads, lanes = q.shape
    unit = UNITS[plan.unit]
    out, lse = plgpu.kernel(
        functools.partial(_forward_kernel, plan=plan),
        kernel_name="flash_forward",
        out_type=[
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ],
        scratch_types=[
            tiles((unit.compute, unit.tile, lanes), dtype),
            tiles((plan.steps, plan.block_kv, lanes), dtype),
            tiles((plan.steps, plan.block_kv, lanes), dtype),
            plgpu.SMEM((plan.steps, *k_fields.shape[2:]), jnp.int32),
            plgpu.SMEM((unit.compute, unit.tile), jnp.float32),
            plgpu.Barrier(num_barriers=unit.compute),
            *barriers(plan.steps, unit.compute, arrays=3),
            *unit.scratch(plan.block_kv, lanes, 1, dtype),
        ],
        **launch(plan.unit, heads, length // plan.block_q, batch, interpret),
    )(lists, q, q_fields, k, v, k_fields)
    return out[:, : shape[1], :, : shape[3]], lse[:, :, : shape[1]].swapaxes(1, 2)


def backward_q(
    q, k, v, q_tokens, k_tokens, lse, delta, d_out, *, window, tuning, interpret=False
) -> jax.Array:
    """The gradient of the queries, dq [B, T, N, H].

    lse, delta: float32 [B, T, N]. d_out: [B, T, N, H]. The lse of a query that sees nothing must be
    a large positive number, so that all its weights become 0.
    """
    shape = q.shape
    dtype = q.dtype
    plan = _plan(q, k, "block_q_dq", "block_kv_dq", tuning, window, interpret)
    q_tokens = pad_tokens(q_tokens, plan.block_q)
    k_tokens = pad_tokens(k_tokens, plan.block_kv)
    lists, _ = visits(q_tokens, k_tokens, plan.block_q, plan.block_kv, window)
    q_fields = token_rows(q_tokens)
    k_fields = blocked(token_rows(k_tokens), plan.block_kv)
    q = pad_heads(q, plan.block_q)
    d_out = pad_heads(d_out.astype(dtype), plan.block_q)
    k = pad_heads(k, plan.block_kv)
    v = pad_heads(v, plan.block_kv)
    batch, length, heads, lanes = q.shape
    unit = UNITS[plan.unit]
    dq = plgpu.kernel(
        functools.partial(_backward_q_kernel, plan=plan),
        kernel_name="flash_backward_q",
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=[
            tiles((unit.compute, unit.tile, lanes), dtype),
            tiles((unit.compute, unit.tile, lanes), dtype),
            tiles((plan.steps, plan.block_kv, lanes), dtype),
            tiles((plan.steps, plan.block_kv, lanes), dtype),
            plgpu.SMEM((plan.steps, *k_fields.shape[2:]), jnp.int32),
            # two copies arrive at each warpgroup's barrier: its rows of q and of d_out
            plgpu.Barrier(num_arrivals=2, num_barriers=unit.compute),
            *barriers(plan.steps, unit.compute, arrays=3),
            *unit.scratch(plan.block_kv, lanes, 1, dtype),
        ],
        **launch(plan.unit, heads, length // plan.block_q, batch, interpret),
    )(lists, q, d_out, _sums(lse, delta, plan), q_fields, k, v, k_fields)
    return dq[:, : shape[1], :, : shape[3]]


def backward_kv(
    q, k, v, q_tokens, k_tokens, lse, delta, d_out, *, window, tuning, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """The gradients (dk, dv) [B, S, K, H]; arguments as for ``backward_q``."""
    shape = k.shape
    dtype = k.dtype
    plan = _plan(q, k, "block_kv_dkv", "block_q_dkv", tuning, window, interpret)
    q_tokens = pad_tokens(q_tokens, plan.block_q)
    k_tokens = pad_tokens(k_tokens, plan.block_kv)
    # the second lists: for each block of keys, the query blocks that may see it
    _, lists = visits(q_tokens, k_tokens, plan.block_q, plan.block_kv, window)
    q_fields = blocked(token_rows(q_tokens), plan.block_q)
    k_fields = token_rows(k_tokens)
    q = pad_heads(q, plan.block_q)
    d_out = pad_heads(d_out.astype(dtype), plan.block_q)
    k = pad_heads(k, plan.block_kv)
    v = pad_heads(v, plan.block_kv)
    batch, length, kv_heads, lanes = k.shape
    unit = UNITS[plan.unit]
    sums = blocked(_sums(lse, delta, plan), plan.block_q)
    dk, dv = plgpu.kernel(
        functools.partial(_backward_kv_kernel, plan=plan),
        kernel_name="flash_backward_kv",
        out_type=[jax.ShapeDtypeStruct(k.shape, dtype)] * 2,
        scratch_types=[
            tiles((unit.compute, unit.tile, lanes), dtype),
            tiles((unit.compute, unit.tile, lanes), dtype),
            tiles((plan.steps, plan.block_q, lanes), dtype),
            tiles((plan.steps, plan.block_q, lanes), dtype),
            plgpu.SMEM((plan.steps, 2, plan.block_q), jnp.float32),
            plgpu.SMEM((plan.steps, *q_fields.shape[2:]), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=unit.compute),
            *barriers(plan.steps, unit.compute, arrays=4),
            *unit.scratch(plan.block_q, lanes, 2, dtype),
        ],
        **launch(plan.unit, kv_heads, length // plan.block_kv, batch, interpret),
    )(lists, k, v, k_fields, q, d_out, sums, q_fields)
    return dk[:, : shape[1], :, : shape[3]], dv[:, : shape[1], :, : shape[3]]


# --- Kernels --------------------------------------------------------------------------------------


# The memory of ``_forward_kernel``.
_ForwardRefs = collections.namedtuple(
    "_ForwardRefs",
    # In HBM: lists of blocks to visit, queries and their tokens, keys, values and their tokens.
    "lists q q_tok k v k_tok "
    # In HBM: the results.
    "out lse "
    # In shared memory: the queries of each warpgroup, and rings of keys, values and their tokens.
    "q_own k_ring v_ring tok_ring "
    # The lse of each warpgroup's queries, before it is copied out.
    "lse_own "
    # Barriers: of the queries, and of the slots of the rings.
    "loaded filled emptied",
)


def _forward_kernel(*arguments, plan):
    refs, scratch = named(_ForwardRefs, arguments)
    row, head, block, wg = (jax.lax.axis_index(name) for name in ("row", "head", "block", "wg"))
    unit = UNITS[plan.unit](scratch, plan.lanes, plan.interpret)
    # the head of a list, see ``blocks.visits``: blocks to visit, and how many need no mask
    count = refs.lists[row, block, 0]
    whole = refs.lists[row, block, 1]

    def compute():
        # every warpgroup takes ``unit.tile`` consecutive rows of the block
        own = pl.ds(block * plan.block_q + wg * unit.tile, unit.tile)
        plgpu.copy_gmem_to_smem(refs.q.at[row, own, head], refs.q_own.at[wg], refs.loaded.at[wg])
        plgpu.barrier_wait(refs.loaded.at[wg])
        # reduce(1) is the layout of a vector along the rows of scores, reduce(0) along the columns
        queries = load_fields(refs.q_tok.at[row, :, own], unit.layout.reduce(1))

        def visit(slot, carry, masked):
            top, total, acc = carry
            # scores, and their maximum ``top``, count in powers of 2: exp2 is one instruction
            scores = unit.product(refs.q_own.at[wg], refs.k_ring.at[slot].transpose((1, 0))) * (
                plan.scale * LOG2_E
            )
            if masked:
                keys = load_fields(refs.tok_ring.at[slot], unit.layout.reduce(0))
                scores = jnp.where(
                    mask(queries, keys, scores.shape, 0, plan.window), scores, MASKED
                )
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

        # above MASKED, so that a masked score weighs nothing even before a visible key was met
        column = unit.layout.reduce(1)
        start = (
            full((unit.tile,), MASKED / 2, column),
            full((unit.tile,), 0, column),
            unit.zero(0),
        )
        top, total, acc = consume(count, whole, refs.filled, refs.emptied, visit, start, plan.steps)
        nothing = total == 0.0
        divisor = jnp.where(nothing, 1.0, total)
        acc = unit.value(acc, 0)
        # the last product has read the queries, so their buffer may hold the result
        refs.q_own.at[wg][...] = (acc / spread(divisor, acc.shape, 0)).astype(refs.q_own.dtype)
        # back from powers of 2 to powers of e
        refs.lse_own.at[wg][...] = jnp.where(
            nothing, -jnp.inf, (top + jnp.log2(divisor)) * (1 / LOG2_E)
        )
        # the copy engine sees what was stored only after this fence
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.q_own.at[wg], refs.out.at[row, own, head])
        plgpu.copy_smem_to_gmem(refs.lse_own.at[wg], refs.lse.at[row, head, own])
        plgpu.wait_smem_to_gmem(0)

    sources = _key_sources(refs.lists, refs.k, refs.v, refs.k_tok, plan)
    rings = (refs.k_ring, refs.v_ring, refs.tok_ring)
    specialise_warps(
        wg,
        unit,
        compute,
        lambda: fetch(count, sources, rings, refs.filled, refs.emptied, plan.steps),
    )


# The memory of ``_backward_q_kernel``, as of ``_ForwardRefs``.
_BackwardQRefs = collections.namedtuple(
    "_BackwardQRefs",
    "lists q "
    # Cotangents of the queries' results, and their lse and delta.
    "d_out sums q_tok k v k_tok "
    # In HBM: the result.
    "dq "
    # In shared memory: the queries and cotangents of each warpgroup, and the rings.
    "q_own d_own k_ring v_ring tok_ring loaded filled emptied",
)


def _backward_q_kernel(*arguments, plan):
    refs, scratch = named(_BackwardQRefs, arguments)
    row, head, block, wg = (jax.lax.axis_index(name) for name in ("row", "head", "block", "wg"))
    unit = UNITS[plan.unit](scratch, plan.lanes, plan.interpret)
    count = refs.lists[row, block, 0]
    whole = refs.lists[row, block, 1]

    def compute():
        own = pl.ds(block * plan.block_q + wg * unit.tile, unit.tile)
        plgpu.copy_gmem_to_smem(refs.q.at[row, own, head], refs.q_own.at[wg], refs.loaded.at[wg])
        plgpu.copy_gmem_to_smem(
            refs.d_out.at[row, own, head], refs.d_own.at[wg], refs.loaded.at[wg]
        )
        plgpu.barrier_wait(refs.loaded.at[wg])
        queries = load_fields(refs.q_tok.at[row, :, own], unit.layout.reduce(1))
        lse, delta = (
            plgpu.load(
                refs.sums.at[row, head, i, own], layout=unit.layout.reduce(1), optimized=False
            )
            for i in range(2)
        )
        # to powers of 2, as the scores
        lse = lse * LOG2_E

        def visit(slot, acc, masked):
            scores = unit.product(refs.q_own.at[wg], refs.k_ring.at[slot].transpose((1, 0))) * (
                plan.scale * LOG2_E
            )
            if masked:
                keys = load_fields(refs.tok_ring.at[slot], unit.layout.reduce(0))
                scores = jnp.where(
                    mask(queries, keys, scores.shape, 0, plan.window), scores, MASKED
                )
            weights = jnp.exp2(scores - spread(lse, scores.shape, 0))
            # with P the weights: dP = d_out v^T and dS = P (dP - delta)
            d_weights = unit.product(refs.d_own.at[wg], refs.v_ring.at[slot].transpose((1, 0)))
            d_scores = weights * (d_weights - spread(delta, scores.shape, 0))
            return unit.add(acc, d_scores.astype(refs.k_ring.dtype), refs.k_ring.at[slot], 0)

        acc = consume(count, whole, refs.filled, refs.emptied, visit, unit.zero(0), plan.steps)
        # the scale of the scores is a factor of the whole sum, and is applied once, at the end
        refs.q_own.at[wg][...] = (unit.value(acc, 0) * plan.scale).astype(refs.q_own.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.q_own.at[wg], refs.dq.at[row, own, head])
        plgpu.wait_smem_to_gmem(0)

    sources = _key_sources(refs.lists, refs.k, refs.v, refs.k_tok, plan)
    rings = (refs.k_ring, refs.v_ring, refs.tok_ring)
    specialise_warps(
        wg,
        unit,
        compute,
        lambda: fetch(count, sources, rings, refs.filled, refs.emptied, plan.steps),
    )


# The memory of ``_backward_kv_kernel``, as of ``_BackwardQRefs``.
_BackwardKVRefs = collections.namedtuple(
    "_BackwardKVRefs",
    "lists k v k_tok q d_out sums q_tok "
    # In HBM: the results.
    "dk dv "
    # In shared memory: the keys and values of each warpgroup, and rings of queries, of their
    # cotangents, of lse and delta, and of tokens.
    "k_own v_own q_ring d_ring sums_ring tok_ring loaded filled emptied",
)


def _backward_kv_kernel(*arguments, plan):
    refs, scratch = named(_BackwardKVRefs, arguments)
    row, head, block, wg = (jax.lax.axis_index(name) for name in ("row", "head", "block", "wg"))
    unit = UNITS[plan.unit](scratch, plan.lanes, plan.interpret)
    # ``head`` is a key/value head here, and each listed query block is visited once for every query
    # head of it
    count = refs.lists[row, block, 0] * plan.groups
    whole = refs.lists[row, block, 1] * plan.groups

    def sources(step):
        # the query heads of one block follow each other
        at = refs.lists[row, block, 2 + jax.lax.div(step, jnp.int32(plan.groups))]
        q_head = head * plan.groups + jax.lax.rem(step, jnp.int32(plan.groups))
        queries = (row, pl.ds(at * plan.block_q, plan.block_q), q_head)
        return (
            refs.q.at[queries],
            refs.d_out.at[queries],
            refs.sums.at[row, q_head, at],
            refs.q_tok.at[row, at],
        )

    def compute():
        own = pl.ds(block * plan.block_kv + wg * unit.tile, unit.tile)
        plgpu.copy_gmem_to_smem(refs.k.at[row, own, head], refs.k_own.at[wg], refs.loaded.at[wg])
        plgpu.copy_gmem_to_smem(refs.v.at[row, own, head], refs.v_own.at[wg], refs.loaded.at[wg])
        plgpu.barrier_wait(refs.loaded.at[wg])
        # scores are transposed: keys lie along the rows, queries along the columns
        keys = load_fields(refs.k_tok.at[row, :, own], unit.layout.reduce(1))

        def visit(slot, carry, masked):
            dk_acc, dv_acc = carry
            lse, delta = (
                plgpu.load(
                    refs.sums_ring.at[slot, i], layout=unit.layout.reduce(0), optimized=False
                )
                for i in range(2)
            )
            scores = unit.product(refs.k_own.at[wg], refs.q_ring.at[slot].transpose((1, 0))) * (
                plan.scale * LOG2_E
            )
            if masked:
                queries = load_fields(refs.tok_ring.at[slot], unit.layout.reduce(0))
                scores = jnp.where(
                    mask(queries, keys, scores.shape, 1, plan.window), scores, MASKED
                )
            weights = jnp.exp2(scores - spread(lse * LOG2_E, scores.shape, 1))
            dv_acc = unit.add(dv_acc, weights.astype(refs.d_ring.dtype), refs.d_ring.at[slot], 1)
            d_weights = unit.product(refs.v_own.at[wg], refs.d_ring.at[slot].transpose((1, 0)))
            d_scores = weights * (d_weights - spread(delta, scores.shape, 1))
            return unit.add(
                dk_acc, d_scores.astype(refs.q_ring.dtype), refs.q_ring.at[slot], 0
            ), dv_acc

        dk_acc, dv_acc = consume(
            count, whole, refs.filled, refs.emptied, visit, (unit.zero(0), unit.zero(1)), plan.steps
        )
        # the buffers of k and v, which are no longer needed, take the results
        refs.k_own.at[wg][...] = (unit.value(dk_acc, 0) * plan.scale).astype(refs.k_own.dtype)
        refs.v_own.at[wg][...] = unit.value(dv_acc, 1).astype(refs.v_own.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.k_own.at[wg], refs.dk.at[row, own, head])
        plgpu.copy_smem_to_gmem(refs.v_own.at[wg], refs.dv.at[row, own, head])
        plgpu.wait_smem_to_gmem(0)

    rings = (refs.q_ring, refs.d_ring, refs.sums_ring, refs.tok_ring)
    specialise_warps(
        wg,
        unit,
        compute,
        lambda: fetch(count, sources, rings, refs.filled, refs.emptied, plan.steps),
    )


def _key_sources(lists, k, v, k_tok, plan: _Plan):
    """A function from a step to what a block of queries copies then: the keys, values and tokens of
    the next key block on its list.
    """
    row, head, block = (jax.lax.axis_index(name) for name in ("row", "head", "block"))

    def sources(step):
        # the first two entries of a list are counts
        at = lists[row, block, 2 + step]
        keys = (
            row,
            pl.ds(at * plan.block_kv, plan.block_kv),
            jax.lax.div(head, jnp.int32(plan.groups)),
        )
        return k.at[keys], v.at[keys], k_tok.at[row, at]

    return sources


def load_fields(ref, layout) -> Tokens:
    """The fields of tokens in registers, from a reference [fields, tokens]."""
    # optimized=False: these short vectors have no vectorised load in the layouts of the scores
    return Tokens(
        *(plgpu.load(ref.at[i], layout=layout, optimized=False) for i in range(ref.shape[0]))
    )


def mask(
    queries: Tokens,
    keys: Tokens,
    shape: tuple[int, ...],
    query_axis: int,
    window: int | None = None,
):
    """bool of ``shape``, the shape of scores: True where a query sees a key.

    query_axis: the axis of the scores along which queries lie; keys lie along the other.
    """
    # The node numbers of the tree are computed here, from vectors. After ``spread`` every field is
    # as large as the scores.
    queries = nodes(queries)[0].map(lambda x: spread(x, shape, query_axis))
    keys = jax.tree.map(lambda x: spread(x, shape, 1 - query_axis), nodes(keys))
    return sees_nodes(queries, *keys, window)


# --- How arrays lie in memory ---------------------------------------------------------------------


def _plan(
    q, k, held: str, streamed: str, tuning: TuningConfig, window: int | None, interpret
) -> _Plan:
    """The plan of a kernel.

    held, streamed: fields of TuningConfig, the size of the blocks that a thread block holds and of
    those that it goes through. Raises ValueError for sizes that the matrix unit cannot multiply.
    """
    unit = UNITS[tuning.matrix_unit]
    sizes = dataclasses.asdict(tuning)
    if sizes[held] != unit.tile * unit.compute:
        raise ValueError(
            f"{held}={sizes[held]} must be {unit.tile * unit.compute} for {tuning.matrix_unit}"
        )
    if sizes[streamed] % 64:
        raise ValueError(f"{streamed}={sizes[streamed]} must be a multiple of 64")
    # in reverse alphabetical order "block_q..." stands before "block_kv...", whichever is held
    block_q, block_kv = (sizes[name] for name in sorted((held, streamed), reverse=True))
    return _Plan(
        block_q=block_q,
        block_kv=block_kv,
        groups=q.shape[2] // k.shape[2],
        steps=tuning.steps,
        scale=q.shape[3] ** -0.5,
        window=window,
        interpret=bool(interpret),
        lanes=padded(q.shape[3], q.dtype),
        unit=tuning.matrix_unit,
    )


def launch(unit: str, heads: int, blocks: int, batch: int, interpret) -> dict:
    """Options of a kernel with a thread block for every head, block and row."""
    return {
        "grid": (heads, blocks, batch),
        "grid_names": ("head", "block", "row"),
        "num_threads": UNITS[unit].compute + 1,
        "thread_name": "wg",
        "compiler_params": plgpu.CompilerParams(approx_math=True),
        "interpret": interpret or None,
    }


def padded(head_dim: int, dtype) -> int:
    """The head size filled up to whole swizzles."""
    width = SWIZZLE // jnp.dtype(dtype).itemsize
    return -(-head_dim // width) * width


def pad_heads(x: jax.Array, block: int) -> jax.Array:
    """[B, T, N, H] with T filled up to whole blocks and the head size to whole swizzles."""
    return pad(pad(x, block), padded(1, x.dtype), axis=3)


def token_rows(tokens: Tokens) -> jax.Array:
    """int32 [B, fields, T]."""
    return jnp.stack(jax.tree.leaves(tokens), axis=1)


def _sums(lse: jax.Array, delta: jax.Array, plan: _Plan) -> jax.Array:
    """lse and delta [B, T, N] together, float32 [B, N, 2, T], T filled up to whole blocks.

    Padding has lse 0. That is harmless: padding is masked, so its weights are 0 all the same.
    """
    return pad(jnp.stack([lse, delta], axis=1), plan.block_q, axis=2).transpose(0, 3, 1, 2)


def blocked(x: jax.Array, block: int) -> jax.Array:
    """[..., fields, T] -> [..., blocks, fields, block]."""
    *outer, fields, length = x.shape
    return x.reshape(*outer, fields, length // block, block).swapaxes(-2, -3)
