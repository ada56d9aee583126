"""Attention in blocks on TPU (Mosaic), forward and backward, in the order of FlashAttention-2
(2307.08691).

A grid step holds one block of queries with all query heads of one key/value head. It goes through
the list of the key blocks that these queries may see. The list lies in scalar memory. The blocks
stay in HBM, and the kernel copies each into one of two buffers in VMEM while it works on the other.
A key block that no query of the block may see is therefore never read.

For the gradients of keys and values the roles are exchanged. A grid step holds a block of keys and
goes through the query blocks that may see it, with transposed scores (keys by queries). Every sum
therefore stays in one grid step.

Dimensions: B rows, T queries, S keys, N query heads, K key/value heads, G = N / K, H head size, R =
G block_q rows.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import Cost
from pallas_kernels.flash.blocks import TuningConfig, cost, visits
from pallas_kernels.padding import pad, pad_tokens
from pallas_kernels.tokens import MASKED, Tokens, sees

VMEM_LIMIT = 60 * 2**20
# Query heads of one key/value head that fit a grid step.
MAX_GROUPS = 16
LANES = 128
DTYPES = ("float32", "bfloat16")
# The devices that the kernels are written for.
TARGETS = ("v5e", "v5p", "v6e")
ELSEWHERE = "no kernel for this TPU"


def obstacle(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> str | None:
    """Reason why q [B, T, N, H] and k [B, S, K, H] of these shapes cannot be attended, or None."""
    groups = q_shape[2] // k_shape[2]
    return (
        None
        if groups <= MAX_GROUPS
        else f"{groups} query heads share a key/value head, more than {MAX_GROUPS}"
    )


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
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    block_q = tuning.block_q
    block_kv = tuning.block_kv
    q_tokens, k_tokens = (pad_tokens(*x) for x in ((q_tokens, block_q), (k_tokens, block_kv)))
    shapes = (q.shape, k.shape)
    lists, _ = visits(q_tokens, k_tokens, block_q, block_kv, window)
    q_fields = token_columns(q_tokens, block_q)
    k_fields = token_rows(k_tokens, block_kv)
    q, k, v = (
        to_blocks(*x)
        for x in ((q, kv_heads, block_q), (k, kv_heads, block_kv), (v, kv_heads, block_kv))
    )
    blocks, rows, lanes = q.shape[2:]
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, scale=head_dim**-0.5, window=window),
        grid=(batch, kv_heads, blocks),
        in_specs=[list_spec(lists), block_spec(rows, lanes), token_spec(q_fields), *in_hbm(3)],
        out_specs=[block_spec(rows, lanes), block_spec(1, rows)],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, blocks, 1, rows), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((2, block_kv, lanes), k.dtype),
            pltpu.VMEM((2, block_kv, lanes), v.dtype),
            pltpu.VMEM((2, *k_fields.shape[2:]), jnp.int32),
            # maximum and sum of the softmax of each row, and its weighted sum of values
            pltpu.VMEM((rows, 1), jnp.float32),
            pltpu.VMEM((rows, 1), jnp.float32),
            pltpu.VMEM((rows, lanes), jnp.float32),
            # one for each buffer and each array that is copied into it
            pltpu.SemaphoreType.DMA((2, 3)),
        ],
        compiler_params=params(),
        interpret=interpret,
        cost_estimate=estimate(cost("forward", *shapes, k.dtype.itemsize, tuning, window)),
        name="flash_forward",
    )(lists[:, :, None], q, q_fields, k, v, k_fields)
    lse = from_blocks(lse.swapaxes(3, 4), block_q, (batch, length, heads, 1))[..., 0]
    return from_blocks(out, block_q, (batch, length, heads, head_dim)), lse


def backward_q(
    q, k, v, q_tokens, k_tokens, lse, delta, d_out, *, window, tuning, interpret=False
) -> jax.Array:
    """The gradient of the queries, dq [B, T, N, H].

    lse, delta: float32 [B, T, N]. d_out: [B, T, N, H]. The lse of a query that sees nothing must be
    a large positive number, so that all its weights become 0.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    block_q = tuning.block_q_dq
    block_kv = tuning.block_kv_dq
    q_tokens, k_tokens = (pad_tokens(*x) for x in ((q_tokens, block_q), (k_tokens, block_kv)))
    shapes = (q.shape, k.shape)
    lists, _ = visits(q_tokens, k_tokens, block_q, block_kv, window)
    q_fields = token_columns(q_tokens, block_q)
    k_fields = token_rows(k_tokens, block_kv)
    sums = to_rows([lse, delta], kv_heads, block_q)
    q, d_out = (to_blocks(x, kv_heads, block_q) for x in (q, d_out.astype(q.dtype)))
    k, v = (to_blocks(x, kv_heads, block_kv) for x in (k, v))
    blocks, rows, lanes = q.shape[2:]
    dq = pl.pallas_call(
        functools.partial(_backward_q_kernel, scale=head_dim**-0.5, window=window),
        grid=(batch, kv_heads, blocks),
        in_specs=[
            list_spec(lists),
            block_spec(rows, lanes),
            block_spec(rows, lanes),
            block_spec(2, rows),
            token_spec(q_fields),
            *in_hbm(3),
        ],
        out_specs=block_spec(rows, lanes),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((2, block_kv, lanes), k.dtype),
            pltpu.VMEM((2, block_kv, lanes), v.dtype),
            pltpu.VMEM((2, *k_fields.shape[2:]), jnp.int32),
            pltpu.VMEM((rows, lanes), jnp.float32),
            pltpu.SemaphoreType.DMA((2, 3)),
        ],
        compiler_params=params(),
        interpret=interpret,
        cost_estimate=estimate(cost("backward_q", *shapes, k.dtype.itemsize, tuning, window)),
        name="flash_backward_q",
    )(lists[:, :, None], q, d_out, sums, q_fields, k, v, k_fields)
    return from_blocks(dq, block_q, (batch, length, heads, head_dim))


def backward_kv(
    q, k, v, q_tokens, k_tokens, lse, delta, d_out, *, window, tuning, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """The gradients (dk, dv) [B, S, K, H]; arguments as for ``backward_q``."""
    batch, length, kv_heads, head_dim = k.shape
    block_q = tuning.block_q_dkv
    block_kv = tuning.block_kv_dkv
    q_tokens, k_tokens = (pad_tokens(*x) for x in ((q_tokens, block_q), (k_tokens, block_kv)))
    shapes = (q.shape, k.shape)
    # the second lists: for each block of keys, the query blocks that may see it
    _, lists = visits(q_tokens, k_tokens, block_q, block_kv, window)
    # scores are transposed, so the queries' fields lie along lanes and the keys' along sublanes
    q_fields = token_rows(q_tokens, block_q)
    k_fields = token_columns(k_tokens, block_kv)
    sums = to_rows([lse, delta], kv_heads, block_q)
    q, d_out = (to_blocks(x, kv_heads, block_q) for x in (q, d_out.astype(q.dtype)))
    k, v = (to_blocks(x, kv_heads, block_kv) for x in (k, v))
    rows, lanes = q.shape[3:]
    dk, dv = pl.pallas_call(
        functools.partial(_backward_kv_kernel, scale=head_dim**-0.5, window=window),
        grid=(batch, kv_heads, k.shape[2]),
        in_specs=[
            list_spec(lists),
            block_spec(block_kv, lanes),
            block_spec(block_kv, lanes),
            token_spec(k_fields),
            *in_hbm(4),
        ],
        out_specs=[block_spec(block_kv, lanes)] * 2,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        scratch_shapes=[
            pltpu.VMEM((2, rows, lanes), q.dtype),
            pltpu.VMEM((2, rows, lanes), q.dtype),
            pltpu.VMEM((2, 2, rows), jnp.float32),
            pltpu.VMEM((2, *q_fields.shape[2:]), jnp.int32),
            pltpu.VMEM((block_kv, lanes), jnp.float32),
            pltpu.VMEM((block_kv, lanes), jnp.float32),
            pltpu.SemaphoreType.DMA((2, 4)),
        ],
        compiler_params=params(),
        interpret=interpret,
        cost_estimate=estimate(cost("backward_kv", *shapes, k.dtype.itemsize, tuning, window)),
        name="flash_backward_kv",
    )(lists[:, :, None], k, v, k_fields, q, d_out, sums, q_fields)
    dk, dv = (from_blocks(x, block_kv, (batch, length, kv_heads, head_dim)) for x in (dk, dv))
    return dk, dv


# --- Kernels --------------------------------------------------------------------------------------


# The memory of ``_forward_kernel``.
_ForwardRefs = collections.namedtuple(
    "_ForwardRefs",
    # The list of blocks to visit, in scalar memory; the grid step's queries and their tokens.
    "lists q q_tok "
    # In HBM: keys, values and their tokens.
    "k v k_tok "
    # The grid step's results.
    "out lse "
    # Two buffers for each of keys, values and tokens.
    "k_two v_two tok_two "
    # Of each row: maximum and sum of the softmax, and the weighted sum of values.
    "top total acc "
    # By buffer, and by array that is copied into it.
    "semaphores",
)


def _forward_kernel(*arguments, scale, window):
    refs = _ForwardRefs(*arguments)
    # above MASKED, so that a masked score weighs nothing even before a visible key was met
    refs.top[...] = jnp.full(refs.top.shape, MASKED / 2, jnp.float32)
    refs.total[...] = jnp.zeros(refs.total.shape, jnp.float32)
    refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)

    def visit(_, slot, masked):
        scores = dot(refs.q[0, 0, 0], refs.k_two[slot], ((1,), (1,))) * scale
        if masked:
            scores = _mask_queries(scores, refs.q_tok, refs.tok_two.at[slot], window)
        new_top = jnp.maximum(refs.top[...], jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - new_top)
        # what was summed so far is relative to the old maximum; ``shrink`` makes it relative to
        # the new one, and has to read ``top`` before it is overwritten
        shrink = jnp.exp(refs.top[...] - new_top)
        refs.top[...] = new_top
        refs.total[...] = refs.total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        refs.acc[...] = refs.acc[...] * shrink + dot(
            weights.astype(refs.v_two.dtype), refs.v_two[slot], ((1,), (0,))
        )

    stream(
        refs.lists,
        ((refs.k, refs.k_two), (refs.v, refs.v_two)),
        (refs.k_tok, refs.tok_two),
        refs.semaphores,
        visit,
    )
    nothing = refs.total[...] == 0
    divisor = jnp.where(nothing, 1.0, refs.total[...])
    refs.out[0, 0, 0] = (refs.acc[...] / divisor).astype(refs.out.dtype)
    refs.lse[0, 0, 0] = _to_lanes(jnp.where(nothing, -jnp.inf, jnp.log(divisor) + refs.top[...]))


# The memory of ``_backward_q_kernel``, as of ``_ForwardRefs``.
_BackwardQRefs = collections.namedtuple(
    "_BackwardQRefs",
    "lists q "
    # Cotangents of the queries' results, and their lse and delta.
    "d_out sums q_tok k v k_tok "
    # The grid step's result.
    "dq k_two v_two tok_two "
    # The sum so far.
    "acc semaphores",
)


def _backward_q_kernel(*arguments, scale, window):
    refs = _BackwardQRefs(*arguments)
    refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)
    # one number for each row of scores
    lse, delta = (to_sublanes(refs.sums[0, 0, 0, i : i + 1]) for i in range(2))

    def visit(_, slot, masked):
        scores = dot(refs.q[0, 0, 0], refs.k_two[slot], ((1,), (1,))) * scale
        if masked:
            scores = _mask_queries(scores, refs.q_tok, refs.tok_two.at[slot], window)
        weights = jnp.exp(scores - lse)
        # with P the weights: dP = d_out v^T and dS = P (dP - delta)
        d_weights = dot(refs.d_out[0, 0, 0], refs.v_two[slot], ((1,), (1,)))
        d_scores = weights * (d_weights - delta)
        refs.acc[...] += dot(d_scores.astype(refs.k_two.dtype), refs.k_two[slot], ((1,), (0,)))

    stream(
        refs.lists,
        ((refs.k, refs.k_two), (refs.v, refs.v_two)),
        (refs.k_tok, refs.tok_two),
        refs.semaphores,
        visit,
    )
    # the scale of the scores is a factor of the whole sum, and is applied once, at the end
    refs.dq[0, 0, 0] = (refs.acc[...] * scale).astype(refs.dq.dtype)


# The memory of ``_backward_kv_kernel``, as of ``_BackwardQRefs``.
_BackwardKVRefs = collections.namedtuple(
    "_BackwardKVRefs",
    "lists "
    # The grid step's keys, values and their tokens.
    "k v k_tok "
    # In HBM: queries, cotangents, lse and delta, and tokens.
    "q d_out sums q_tok "
    # The grid step's results.
    "dk dv "
    # Two buffers for each of these four.
    "q_two d_out_two sums_two tok_two "
    # The sums so far.
    "dk_acc dv_acc semaphores",
)


def _backward_kv_kernel(*arguments, scale, window):
    refs = _BackwardKVRefs(*arguments)
    refs.dk_acc[...] = jnp.zeros(refs.dk_acc.shape, jnp.float32)
    refs.dv_acc[...] = jnp.zeros(refs.dv_acc.shape, jnp.float32)

    def visit(_, slot, masked):
        # transposed: keys by queries, with one lse and one delta for each column
        scores = dot(refs.k[0, 0, 0], refs.q_two[slot], ((1,), (1,))) * scale
        lse, delta = (refs.sums_two[slot, i : i + 1] for i in range(2))
        if masked:
            scores = _mask_keys(scores, refs.tok_two.at[slot], refs.k_tok, window)
        weights = jnp.exp(scores - lse)
        refs.dv_acc[...] += dot(
            weights.astype(refs.q_two.dtype), refs.d_out_two[slot], ((1,), (0,))
        )
        d_weights = dot(refs.v[0, 0, 0], refs.d_out_two[slot], ((1,), (1,)))
        d_scores = weights * (d_weights - delta)
        refs.dk_acc[...] += dot(d_scores.astype(refs.q_two.dtype), refs.q_two[slot], ((1,), (0,)))

    stream(
        refs.lists,
        ((refs.q, refs.q_two), (refs.d_out, refs.d_out_two), (refs.sums, refs.sums_two)),
        (refs.q_tok, refs.tok_two),
        refs.semaphores,
        visit,
    )
    refs.dk[0, 0, 0] = (refs.dk_acc[...] * scale).astype(refs.dk.dtype)
    refs.dv[0, 0, 0] = refs.dv_acc[...].astype(refs.dv.dtype)


def stream(lists, arrays, tokens, semaphores, visit: Callable) -> None:
    """Calls visit(block, slot, masked) for each block on the list, while the next one is fetched.

    When ``visit`` runs, the arrays of the block are in ``slot`` of their buffers. arrays: pairs of
    a whole array in HBM [B, K, blocks, ...] and its buffer [2, ...]. tokens: such a pair, whose
    array has no axis of heads.
    """
    row = pl.program_id(0)
    head = pl.program_id(1)
    # the head of a list, see ``blocks.visits``: blocks to visit, and how many need no mask
    count = lists[0, 0, 0, 0]
    whole = lists[0, 0, 0, 1]

    def copies(step):
        at = lists[0, 0, 0, 2 + step]
        slot = step % 2
        pairs = [(source.at[row, head, at], buffer.at[slot]) for source, buffer in arrays]
        pairs.append((tokens[0].at[row, at], tokens[1].at[slot]))
        return [
            pltpu.make_async_copy(*pair, semaphores.at[slot, i]) for i, pair in enumerate(pairs)
        ]

    def start(step):
        for copy in copies(step):
            copy.start()

    @pl.when(count > 0)
    def _():
        start(0)

    @pl.loop(0, count)
    def _(step):
        @pl.when(step + 1 < count)
        def _():
            # Into the other slot. Nobody reads it any more: the visit of step - 1 is over.
            start(step + 1)

        # the same descriptors as were started a step ago; to wait, a copy needs its semaphore
        for copy in copies(step):
            copy.wait()
        at = lists[0, 0, 0, 2 + step]
        pl.when(step < whole)(lambda: visit(at, step % 2, False))
        pl.when(step >= whole)(lambda: visit(at, step % 2, True))


def _mask_queries(scores, q_tok, k_tok, window):
    """The scores [R, block_kv], MASKED where a query does not see a key.

    q_tok: [1, 1, block_q, fields]. k_tok: [fields, block_kv].
    """
    mask = sees(from_columns(q_tok), from_rows(k_tok), window)
    # rows are G heads of block_q queries each, and the heads share one mask
    grouped = scores.reshape(-1, *mask.shape)
    return jnp.where(mask[None], grouped, MASKED).reshape(scores.shape)


def _mask_keys(scores, q_tok, k_tok, window):
    """``_mask_queries`` of transposed scores [block_kv, R].

    q_tok: [fields, block_q]. k_tok: [1, 1, block_kv, fields].
    """
    mask = sees(from_rows(q_tok), from_columns(k_tok), window)
    # columns are G heads of block_q queries each; the mask of one is repeated side by side
    bias = jnp.where(mask, 0.0, MASKED)
    return scores + jnp.concatenate([bias] * (scores.shape[1] // bias.shape[1]), axis=1)


def from_columns(ref) -> Tokens:
    """Fields [block, 1] of [1, 1, block, fields]."""
    return Tokens(*(ref[0, 0, :, i : i + 1] for i in range(ref.shape[3])))


def from_rows(ref) -> Tokens:
    """Fields [1, block] of [fields, block]."""
    return Tokens(*(ref[i : i + 1] for i in range(ref.shape[0])))


def dot(a, b, contract):
    """a and b multiplied and summed over the axes ``contract``, in float32."""
    # without it the matrix unit rounds float32 operands to bfloat16
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _to_lanes(column):
    """[R, 1] -> [1, R], by the transpose of an array with full lanes."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def to_sublanes(row):
    """[1, R] -> [R, 1], by the transpose of an array with LANES sublanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


# --- How arrays lie in memory ---------------------------------------------------------------------


def params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "parallel"), vmem_limit_bytes=VMEM_LIMIT
    )


def estimate(cost: Cost) -> pl.CostEstimate:
    return pl.CostEstimate(**dataclasses.asdict(cost))


def list_spec(lists: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(
        (1, 1, 1, lists.shape[-1]), lambda b, h, i: (b, i, 0, 0), memory_space=pltpu.SMEM
    )


def block_spec(rows: int, lanes: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, 1, rows, lanes), lambda b, h, i: (b, h, i, 0, 0))


def token_spec(fields: jax.Array) -> pl.BlockSpec:
    """The block of a grid step in what ``token_columns`` returns."""
    return pl.BlockSpec((1, 1, *fields.shape[2:]), lambda b, h, i: (b, i, 0, 0))


def in_hbm(count: int) -> list[pl.BlockSpec]:
    return [pl.BlockSpec(memory_space=pl.ANY)] * count


def token_columns(tokens: Tokens, block: int) -> jax.Array:
    """int32 [B, blocks, block, fields]."""
    x = jnp.stack(jax.tree.leaves(tokens), axis=-1)
    return x.reshape(x.shape[0], -1, block, x.shape[-1])


def token_rows(tokens: Tokens, block: int) -> jax.Array:
    """int32 [B, blocks, fields, block]."""
    return token_columns(tokens, block).swapaxes(2, 3)


def to_blocks(x: jax.Array, kv_heads: int, block: int) -> jax.Array:
    """[B, T, N, H] -> [B, K, blocks, G block, lanes], the head size padded to full lanes.

    A block's rows are the G query heads of a key/value head, each with all its tokens. A mask of
    the tokens then serves every head.
    """
    x = pad(pad(x, block), LANES, axis=3)
    batch, length, heads, lanes = x.shape
    x = x.reshape(batch, length // block, block, kv_heads, heads // kv_heads, lanes)
    return x.transpose(0, 3, 1, 4, 2, 5).reshape(batch, kv_heads, length // block, -1, lanes)


def from_blocks(x: jax.Array, block: int, shape: tuple[int, ...]) -> jax.Array:
    """The inverse; shape [B, T, N, H]."""
    batch, kv_heads, blocks, _, lanes = x.shape
    x = x.reshape(batch, kv_heads, blocks, -1, block, lanes).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(batch, blocks * block, -1, lanes)[:, : shape[1], :, : shape[3]]


def to_rows(sums: Sequence[jax.Array], kv_heads: int, block: int) -> jax.Array:
    """Arrays [B, T, N] -> [B, K, blocks, sums, G block], in the order of ``to_blocks``' rows."""
    x = pad(jnp.stack(sums, axis=-1), block)
    batch, length, heads, count = x.shape
    x = x.reshape(batch, length // block, block, kv_heads, heads // kv_heads, count)
    return x.transpose(0, 3, 1, 5, 4, 2).reshape(batch, kv_heads, length // block, count, -1)
