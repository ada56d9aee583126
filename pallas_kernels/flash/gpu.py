"""Attention in blocks on Hopper GPUs (Mosaic GPU), as FlashAttention-2 (2307.08691) orders it, forward and backward.

A thread block holds one block of queries of one head in two warpgroups, which multiply with wgmma while a third copies
the listed key blocks into a ring of shared memory. Keys' gradients go the other way round: a thread block holds a block
of keys and goes through the query blocks that may see it, for every query head of the key's head, with transposed
scores, so that every sum stays in one thread block.

Head sizes are padded to a multiple of 64. The GPU interpreter has no wgmma beside shared memory; there the products are
jnp's, and all else is as on the device.

Dimensions: B rows, T queries, S keys, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash.blocks import TuningConfig, pad, visits
from pallas_kernels.tokens import Tokens, sees

DTYPES = ("bfloat16", "float16")
# The devices that the kernels are written for.
TARGETS = ("h100", "h200")
ELSEWHERE = "no kernel: wgmma is Hopper's, Blackwell wants tcgen05"
MASKED = -1e30
LOG2_E = math.log2(math.e)
# Rows of a warpgroup's tile, the warpgroups that compute, and the bytes of a swizzled line.
TILE = 64
COMPUTE = 2
SWIZZLE = 128
ROWS, COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def obstacle(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> str | None:
    """Why q [B, T, N, H] and k [B, S, K, H] of these shapes cannot be attended, or None."""
    return None if q_shape[3] <= 128 else f"head size {q_shape[3]} is more than 128"


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static in a kernel."""

    block_q: int
    block_kv: int
    groups: int
    steps: int
    scale: float
    window: int | None
    interpret: bool


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
    """(out [B, T, N, H] in v's dtype, lse [B, T, N] float32) of q [B, T, N, H] and k, v [B, S, K, H]."""
    shape, dtype = q.shape, v.dtype
    plan = _plan(q, k, tuning.block_q, tuning.block_kv, tuning.steps, window, interpret)
    q_tokens, k_tokens = _pad_tokens(q_tokens, plan.block_q), _pad_tokens(k_tokens, plan.block_kv)
    lists, _ = visits(q_tokens, k_tokens, plan.block_q, plan.block_kv, window)
    q, k, v = _pad_heads(q, plan.block_q), _pad_heads(k, plan.block_kv), _pad_heads(v, plan.block_kv)
    batch, length, heads, lanes = q.shape
    out, lse = plgpu.kernel(
        functools.partial(_forward_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ],
        scratch_types=[
            _tiles((COMPUTE, TILE, lanes), dtype),
            _tiles((plan.steps, plan.block_kv, lanes), dtype),
            _tiles((plan.steps, plan.block_kv, lanes), dtype),
            plgpu.SMEM((plan.steps, 4, plan.block_kv), jnp.int32),
            plgpu.SMEM((COMPUTE, TILE), jnp.float32),
            plgpu.Barrier(num_barriers=COMPUTE),
            *_ring(plan, arrays=3),
        ],
        **_launch(heads, length // plan.block_q, batch, interpret),
    )(lists, q, _fields(q_tokens), k, v, _blocked(_fields(k_tokens), plan.block_kv))
    return out[:, : shape[1], :, : shape[3]], lse[:, :, : shape[1]].swapaxes(1, 2)


def backward_q(q, k, v, q_tokens, k_tokens, lse, delta, d_out, *, window, tuning, interpret=False) -> jax.Array:
    """dq [B, T, N, H]. lse, delta: float32 [B, T, N]; d_out [B, T, N, H]; a query that sees nothing has lse +large."""
    shape, dtype = q.shape, q.dtype
    plan = _plan(q, k, tuning.block_q_dq, tuning.block_kv_dq, tuning.steps, window, interpret)
    q_tokens, k_tokens = _pad_tokens(q_tokens, plan.block_q), _pad_tokens(k_tokens, plan.block_kv)
    lists, _ = visits(q_tokens, k_tokens, plan.block_q, plan.block_kv, window)
    q, d_out = _pad_heads(q, plan.block_q), _pad_heads(d_out.astype(dtype), plan.block_q)
    k, v = _pad_heads(k, plan.block_kv), _pad_heads(v, plan.block_kv)
    batch, length, heads, lanes = q.shape
    dq = plgpu.kernel(
        functools.partial(_backward_q_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=[
            _tiles((COMPUTE, TILE, lanes), dtype),
            _tiles((COMPUTE, TILE, lanes), dtype),
            _tiles((plan.steps, plan.block_kv, lanes), dtype),
            _tiles((plan.steps, plan.block_kv, lanes), dtype),
            plgpu.SMEM((plan.steps, 4, plan.block_kv), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE),
            *_ring(plan, arrays=3),
        ],
        **_launch(heads, length // plan.block_q, batch, interpret),
    )(lists, q, d_out, _sums(lse, delta, plan), _fields(q_tokens), k, v, _blocked(_fields(k_tokens), plan.block_kv))
    return dq[:, : shape[1], :, : shape[3]]


def backward_kv(
    q, k, v, q_tokens, k_tokens, lse, delta, d_out, *, window, tuning, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """(dk, dv) [B, S, K, H]; arguments as for ``backward_q``."""
    shape, dtype = k.shape, k.dtype
    plan = _plan(q, k, tuning.block_q_dkv, tuning.block_kv_dkv, tuning.steps, window, interpret)
    q_tokens, k_tokens = _pad_tokens(q_tokens, plan.block_q), _pad_tokens(k_tokens, plan.block_kv)
    _, lists = visits(q_tokens, k_tokens, plan.block_q, plan.block_kv, window)
    q, d_out = _pad_heads(q, plan.block_q), _pad_heads(d_out.astype(dtype), plan.block_q)
    k, v = _pad_heads(k, plan.block_kv), _pad_heads(v, plan.block_kv)
    batch, length, kv_heads, lanes = k.shape
    sums = _blocked(_sums(lse, delta, plan), plan.block_q)
    dk, dv = plgpu.kernel(
        functools.partial(_backward_kv_kernel, plan=plan),
        out_type=[jax.ShapeDtypeStruct(k.shape, dtype)] * 2,
        scratch_types=[
            _tiles((COMPUTE, TILE, lanes), dtype),
            _tiles((COMPUTE, TILE, lanes), dtype),
            _tiles((plan.steps, plan.block_q, lanes), dtype),
            _tiles((plan.steps, plan.block_q, lanes), dtype),
            plgpu.SMEM((plan.steps, 2, plan.block_q), jnp.float32),
            plgpu.SMEM((plan.steps, 4, plan.block_q), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE),
            *_ring(plan, arrays=4),
        ],
        **_launch(kv_heads, length // plan.block_kv, batch, interpret),
    )(lists, k, v, _fields(k_tokens), q, d_out, sums, _blocked(_fields(q_tokens), plan.block_q))
    return dk[:, : shape[1], :, : shape[3]], dv[:, : shape[1], :, : shape[3]]


# --- Kernels ---------------------------------------------------------------------------------------------------------


def _forward_kernel(
    lists, q, q_tok, k, v, k_tok, out, lse, q_own, k_ring, v_ring, tok_ring, lse_own, loaded, filled, emptied, *, plan
):
    row, head, block, wg = (jax.lax.axis_index(name) for name in ("row", "head", "block", "wg"))
    count, whole = lists[row, block, 0], lists[row, block, 1]

    def sources(step):
        at = lists[row, block, 2 + step]
        keys = (row, pl.ds(at * plan.block_kv, plan.block_kv), jax.lax.div(head, jnp.int32(plan.groups)))
        return k.at[keys], v.at[keys], k_tok.at[row, at]

    def compute():
        own = pl.ds(block * plan.block_q + wg * TILE, TILE)
        plgpu.copy_gmem_to_smem(q.at[row, own, head], q_own.at[wg], loaded.at[wg])
        plgpu.barrier_wait(loaded.at[wg])
        queries = [plgpu.load(q_tok.at[row, i, own], layout=ROWS, optimized=False) for i in range(4)]

        def visit(slot, carry, masked):
            top, total, acc = carry
            scores = _product(q_own.at[wg], k_ring.at[slot].transpose((1, 0)), plan) * (plan.scale * LOG2_E)
            if masked:
                keys = [plgpu.load(tok_ring.at[slot, i], layout=COLUMNS) for i in range(4)]
                scores = jnp.where(_mask(queries, keys, scores.shape, 0, plan), scores, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=1))
            weights = jnp.exp2(scores - _spread(new_top, scores.shape, 0))
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + weights.sum(axis=1)
            acc = acc * _spread(shrink, acc.shape, 0)
            return new_top, total, _add_product(acc, weights.astype(v_ring.dtype), v_ring.at[slot], plan)

        # above MASKED, so that a masked score weighs nothing even before a visible key was met
        start = (_full((TILE,), MASKED / 2, ROWS), _full((TILE,), 0, ROWS), _zeros((TILE, q_own.shape[-1])))
        top, total, acc = _consume(count, whole, filled, emptied, visit, start, plan)
        nothing = total == 0.0
        divisor = jnp.where(nothing, 1.0, total)
        q_own.at[wg][...] = (acc / _spread(divisor, acc.shape, 0)).astype(q_own.dtype)
        lse_own.at[wg][...] = jnp.where(nothing, -jnp.inf, (top + jnp.log2(divisor)) * (1 / LOG2_E))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_own.at[wg], out.at[row, own, head])
        plgpu.copy_smem_to_gmem(lse_own.at[wg], lse.at[row, head, own])
        plgpu.wait_smem_to_gmem(0)

    _split(wg, compute, lambda: _fetch(count, sources, (k_ring, v_ring, tok_ring), filled, emptied, plan))


def _backward_q_kernel(
    lists,
    q,
    d_out,
    sums,
    q_tok,
    k,
    v,
    k_tok,
    dq,
    q_own,
    d_own,
    k_ring,
    v_ring,
    tok_ring,
    loaded,
    filled,
    emptied,
    *,
    plan,
):
    row, head, block, wg = (jax.lax.axis_index(name) for name in ("row", "head", "block", "wg"))
    count, whole = lists[row, block, 0], lists[row, block, 1]

    def sources(step):
        at = lists[row, block, 2 + step]
        keys = (row, pl.ds(at * plan.block_kv, plan.block_kv), jax.lax.div(head, jnp.int32(plan.groups)))
        return k.at[keys], v.at[keys], k_tok.at[row, at]

    def compute():
        own = pl.ds(block * plan.block_q + wg * TILE, TILE)
        plgpu.copy_gmem_to_smem(q.at[row, own, head], q_own.at[wg], loaded.at[wg])
        plgpu.copy_gmem_to_smem(d_out.at[row, own, head], d_own.at[wg], loaded.at[wg])
        plgpu.barrier_wait(loaded.at[wg])
        queries = [plgpu.load(q_tok.at[row, i, own], layout=ROWS, optimized=False) for i in range(4)]
        lse, delta = (plgpu.load(sums.at[row, head, i, own], layout=ROWS, optimized=False) for i in range(2))
        lse = lse * LOG2_E

        def visit(slot, acc, masked):
            scores = _product(q_own.at[wg], k_ring.at[slot].transpose((1, 0)), plan) * (plan.scale * LOG2_E)
            if masked:
                keys = [plgpu.load(tok_ring.at[slot, i], layout=COLUMNS) for i in range(4)]
                scores = jnp.where(_mask(queries, keys, scores.shape, 0, plan), scores, MASKED)
            weights = jnp.exp2(scores - _spread(lse, scores.shape, 0))
            d_weights = _product(d_own.at[wg], v_ring.at[slot].transpose((1, 0)), plan)
            d_scores = weights * (d_weights - _spread(delta, scores.shape, 0))
            return _add_product(acc, d_scores.astype(k_ring.dtype), k_ring.at[slot], plan)

        acc = _consume(count, whole, filled, emptied, visit, _zeros((TILE, q_own.shape[-1])), plan)
        q_own.at[wg][...] = (acc * plan.scale).astype(q_own.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_own.at[wg], dq.at[row, own, head])
        plgpu.wait_smem_to_gmem(0)

    _split(wg, compute, lambda: _fetch(count, sources, (k_ring, v_ring, tok_ring), filled, emptied, plan))


def _backward_kv_kernel(
    lists, k, v, k_tok, q, d_out, sums, q_tok, dk, dv,
    k_own, v_own, q_ring, d_ring, sums_ring, tok_ring, loaded, filled, emptied, *, plan
):  # fmt: skip
    row, head, block, wg = (jax.lax.axis_index(name) for name in ("row", "head", "block", "wg"))
    count, whole = lists[row, block, 0] * plan.groups, lists[row, block, 1] * plan.groups

    def sources(step):
        at = lists[row, block, 2 + jax.lax.div(step, jnp.int32(plan.groups))]
        q_head = head * plan.groups + jax.lax.rem(step, jnp.int32(plan.groups))
        queries = (row, pl.ds(at * plan.block_q, plan.block_q), q_head)
        return q.at[queries], d_out.at[queries], sums.at[row, q_head, at], q_tok.at[row, at]

    def compute():
        own = pl.ds(block * plan.block_kv + wg * TILE, TILE)
        plgpu.copy_gmem_to_smem(k.at[row, own, head], k_own.at[wg], loaded.at[wg])
        plgpu.copy_gmem_to_smem(v.at[row, own, head], v_own.at[wg], loaded.at[wg])
        plgpu.barrier_wait(loaded.at[wg])
        keys = [plgpu.load(k_tok.at[row, i, own], layout=ROWS, optimized=False) for i in range(4)]

        def visit(slot, carry, masked):
            dk_acc, dv_acc = carry
            lse, delta = (plgpu.load(sums_ring.at[slot, i], layout=COLUMNS) for i in range(2))
            scores = _product(k_own.at[wg], q_ring.at[slot].transpose((1, 0)), plan) * (plan.scale * LOG2_E)
            if masked:
                queries = [plgpu.load(tok_ring.at[slot, i], layout=COLUMNS) for i in range(4)]
                scores = jnp.where(_mask(queries, keys, scores.shape, 1, plan), scores, MASKED)
            weights = jnp.exp2(scores - _spread(lse * LOG2_E, scores.shape, 1))
            dv_acc = _add_product(dv_acc, weights.astype(d_ring.dtype), d_ring.at[slot], plan)
            d_weights = _product(v_own.at[wg], d_ring.at[slot].transpose((1, 0)), plan)
            d_scores = weights * (d_weights - _spread(delta, scores.shape, 1))
            return _add_product(dk_acc, d_scores.astype(q_ring.dtype), q_ring.at[slot], plan), dv_acc

        zeros = _zeros((TILE, k_own.shape[-1]))
        dk_acc, dv_acc = _consume(count, whole, filled, emptied, visit, (zeros, zeros), plan)
        k_own.at[wg][...] = (dk_acc * plan.scale).astype(k_own.dtype)
        v_own.at[wg][...] = dv_acc.astype(v_own.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_own.at[wg], dk.at[row, own, head])
        plgpu.copy_smem_to_gmem(v_own.at[wg], dv.at[row, own, head])
        plgpu.wait_smem_to_gmem(0)

    rings = (q_ring, d_ring, sums_ring, tok_ring)
    _split(wg, compute, lambda: _fetch(count, sources, rings, filled, emptied, plan))


def _split(wg, compute: Callable, fetch: Callable) -> None:
    """The last warpgroup fetches with few registers, the others compute with the rest."""

    @pl.when(wg < COMPUTE)
    def _():
        plgpu.set_max_registers(232, action="increase")
        compute()

    @pl.when(wg == COMPUTE)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        fetch()


def _fetch(count, sources: Callable, rings, filled, emptied, plan: _Plan) -> None:
    """Copies sources(step) of every step into the rings, as far ahead as they hold, and waits until all were used."""

    @pl.loop(0, count + plan.steps)
    def _(step):
        slot = jax.lax.rem(step, jnp.int32(plan.steps))

        @pl.when(step >= plan.steps)
        def _():
            plgpu.barrier_wait(emptied.at[slot])

        @pl.when(step < count)
        def _():
            for source, ring in zip(sources(step), rings, strict=True):
                plgpu.copy_gmem_to_smem(source, ring.at[slot], filled.at[slot])


def _consume(count, whole, filled, emptied, visit: Callable, carry, plan: _Plan):
    """The carry after visit(slot, carry, masked) of every step, the first ``whole`` of them without a mask."""

    def one(step, carry, masked: bool):
        slot = jax.lax.rem(step, jnp.int32(plan.steps))
        plgpu.barrier_wait(filled.at[slot])
        carry = visit(slot, carry, masked)
        plgpu.commit_smem()  # what was read by loads may be overwritten by the copy engine only after a fence
        plgpu.barrier_arrive(emptied.at[slot])
        return carry

    carry = jax.lax.fori_loop(0, whole, functools.partial(one, masked=False), carry)
    return jax.lax.fori_loop(whole, count, functools.partial(one, masked=True), carry)


def _mask(queries, keys, shape, query_axis: int, plan: _Plan):
    """Who sees whom of the fields of queries, along ``query_axis`` of scores of this shape, and of keys."""
    queries = Tokens(*(_spread(x, shape, query_axis) for x in queries))
    return sees(queries, Tokens(*(_spread(x, shape, 1 - query_axis) for x in keys)), plan.window)


def _product(a, b, plan: _Plan):
    """a @ b in float32 of references to shared memory."""
    if plan.interpret:
        return jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _add_product(acc, a, b, plan: _Plan):
    """acc + a @ b of registers and a reference to shared memory."""
    if plan.interpret:
        return acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def _spread(x, shape, axis: int):
    return jax.lax.broadcast_in_dim(x, shape, [axis])


def _full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _zeros(shape):
    return _full(shape, 0, plgpu.Layout.WGMMA)


# --- How arrays lie in memory ----------------------------------------------------------------------------------------


def _plan(q, k, block_q: int, block_kv: int, steps: int, window: int | None, interpret) -> _Plan:
    return _Plan(block_q, block_kv, q.shape[2] // k.shape[2], steps, q.shape[3] ** -0.5, window, bool(interpret))


def _launch(heads: int, blocks: int, batch: int, interpret) -> dict:
    return {
        "grid": (heads, blocks, batch),
        "grid_names": ("head", "block", "row"),
        "num_threads": COMPUTE + 1,
        "thread_name": "wg",
        "compiler_params": plgpu.CompilerParams(approx_math=True),
        "interpret": interpret or None,
    }


def _tiles(shape: tuple[int, ...], dtype):
    """Shared memory as wgmma and TMA want it."""
    width = SWIZZLE // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(SWIZZLE))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _ring(plan: _Plan, arrays: int) -> list:
    """Barriers of a ring: a slot is filled by so many copies and emptied by the warpgroups that compute."""
    return [
        plgpu.Barrier(num_arrivals=arrays, num_barriers=plan.steps),
        plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=plan.steps),
    ]


def _pad_tokens(tokens: Tokens, block: int) -> Tokens:
    return tokens.map(lambda x: pad(x, block))


def _pad_heads(x: jax.Array, block: int) -> jax.Array:
    return pad(pad(x, block), SWIZZLE // x.dtype.itemsize, axis=3)


def _fields(tokens: Tokens) -> jax.Array:
    """int32 [B, 4, T]."""
    return jnp.stack(jax.tree.leaves(tokens), axis=1)


def _sums(lse: jax.Array, delta: jax.Array, plan: _Plan) -> jax.Array:
    """float32 [B, N, 2, T] of two [B, T, N]."""
    return pad(jnp.stack([lse, delta], axis=1), plan.block_q, axis=2).transpose(0, 3, 1, 2)


def _blocked(x: jax.Array, block: int) -> jax.Array:
    """[..., fields, T] -> [..., blocks, fields, block]."""
    *outer, fields, length = x.shape
    return x.reshape(*outer, fields, length // block, block).swapaxes(-2, -3)
