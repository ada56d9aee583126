"""Softmax attention to every key that a query may see, perhaps the last ``window`` of them only.

``dense_attention`` takes the kernel of ``pallas_kernels.flash`` where that can run. In XLA short
rows keep all their scores for the backward pass, and longer ones run in blocks of queries and keys:
no array of all scores, and blocks without a visible pair are not visited, so that packed rows,
windows, documents and prompts shared by a group cost what they see. All return the log-sum-exp of
each query's scores too, differentiable, by which results over different keys merge
(``softmax.merge``).

The blocks follow FlashAttention-2 (2307.08691), with scores laid out keys by queries: on CPU every
product of the backward pass then reads its operands in the order in which they lie in memory. With
queries by keys two products do not, and run at a third of the speed. The mask is computed once for
a block and shared by its heads.

Rows and key/value heads are taken one after another, so that a row visits only the blocks it needs
and every product is one of two matrices: on CPU a batch of two products takes about twice as long
as the two alone. The caller shards rows and heads.

Dimensions: B rows, T queries, S keys, N query heads, K key/value heads, G = N / K, H head size, M =
G times the queries of a block, R = B times K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.flash.api import flash_attention
from pallas_kernels.flash.blocks import visits
from pallas_kernels.padding import pad, pad_tokens, without_padding
from pallas_kernels.softmax import masked_attention
from pallas_kernels.tokens import MASKED, Tokens, sees, visible

# Rows of at most this many keys are one block whose scores are kept for the backward pass.
DIRECT = 1024
# Whole rows of at most this many keys are faster on CPU with all their scores in memory.
SHORT = 128
# The implementation that is no kernel.
XLA = "xla"
# Tokens of keys that one step takes where blocks are smaller and seen whole: a product's operands
# then stay in a core's cache, and are large enough for its full speed.
_TOGETHER = 128


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_tokens: Tokens,
    k_tokens: Tokens,
    *,
    window: int | None = None,
    block: int | None = None,
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention with scores scaled by 1/sqrt(H), in float32 or wider.

    N must be a multiple of K; query head n reads key/value head n // (N / K). window: see
    ``visible``. implementation: "xla", or of the kernels as for ``flash_attention``; None takes a
    kernel where one can run. block: of "xla", tokens of a block of queries and of keys; None
    chooses, and keeps all scores of rows of at most DIRECT keys.

    Returns (out in v's dtype, lse): a query that sees no key has out 0 and lse -inf.
    """
    check_heads(q, k)

    def in_xla():
        if block is None and k.shape[1] <= DIRECT:
            return masked_attention(q, k, v, visible(q_tokens, k_tokens, window))
        size = block or block_size(k.shape[1], window)
        return blockwise_attention(q, k, v, q_tokens, k_tokens, window, size)

    if implementation == XLA or block is not None:
        return in_xla()
    choice = dict(implementation=implementation, interpret=interpret, fallback=in_xla)
    return flash_attention(q, k, v, q_tokens, k_tokens, window=window, **choice)


def blockwise_or_kernel(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_tokens: Tokens,
    k_tokens: Tokens,
    window: int | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """``dense_attention`` that never keeps all scores of a row, however short it is."""

    def in_blocks():
        size = block_size(k.shape[1], window)
        return blockwise_attention(q, k, v, q_tokens, k_tokens, window, size)

    return flash_attention(q, k, v, q_tokens, k_tokens, window=window, fallback=in_blocks)


def check_heads(q: jax.Array, k: jax.Array) -> None:
    """Raises ValueError unless the query heads are a multiple of the key/value heads."""
    num_heads = q.shape[2]
    num_kv_heads = k.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")


def block_size(keys: int, window: int | None) -> int:
    """Tokens of a block: few enough that what is computed in vain stays small, many enough for
    large products. Short rows, which are mostly edges of what is seen, have the smallest blocks.
    """
    if keys < 2048:
        return 64
    least, part = (64, window // 8) if window else (128, keys // 16)
    return min(max(least, part), 512)


def mean_trips(tokens: Tokens, window: int | None, block: int) -> float:
    """How often each of the two loops over a query block's key blocks would run, if both ran
    equally often.

    Mean over the query blocks of rows of queries and keys; for counting FLOPs, which makes this
    exact.
    """
    padded = pad_tokens(tokens, block)
    visited = visits(padded, padded, block, block, window)[0][..., 0]
    return float(jnp.mean(visited)) / (1 + _together(block, padded.shape[1] // block))


def blockwise_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_tokens: Tokens,
    k_tokens: Tokens,
    window: int | None,
    block: int,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) as ``dense_attention``, differentiable in both. block: tokens of a block of
    queries and of keys.
    """
    q = without_padding(q, q_tokens)
    k, v = (without_padding(x, k_tokens) for x in (k, v))
    return _blockwise(q, k, v, q_tokens, k_tokens, window, block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _blockwise(q, k, v, q_tokens, k_tokens, window, block):
    return _forward(q, k, v, q_tokens, k_tokens, window, block)[0]


def _forward(q, k, v, q_tokens, k_tokens, window, block):
    wide = jnp.promote_types(jnp.float32, q.dtype)
    scale = q.shape[-1] ** -0.5

    def query_block(xs, keys):
        q, q_tok, visit = xs
        (k, v_t, _) = keys
        q_t = q.T

        def key_blocks(at, mask, carry):
            top, total, acc = carry
            scores = _scores(q_t, _side_by_side(k, at, 0), mask)
            new_top = jnp.maximum(top, jnp.max(scores, axis=0))
            weights = jnp.exp((scores - new_top) * scale)
            shrink = jnp.exp((top - new_top) * scale)
            total = total * shrink + jnp.sum(weights, axis=0)
            values = _side_by_side(v_t, at, 1)
            out = jnp.matmul(values, weights.astype(values.dtype), preferred_element_type=wide)
            return new_top, total, acc * shrink + out

        # above MASKED, so that a masked score weighs nothing even before a visible key was met
        top = jnp.full(q.shape[:1], MASKED / 2, wide)
        start = (top, jnp.zeros_like(top), jnp.zeros(q_t.shape, wide))
        top, total, acc = _visit(key_blocks, q, q_tok, visit, keys, window, start)
        blind = total == 0.0  # and not total > 0, by which NaN would pass for nothing seen
        out = acc * jnp.where(blind, 0.0, 1.0 / total)
        return out.astype(v.dtype), jnp.where(blind, -jnp.inf, jnp.log(total) + top * scale)

    def row(xs):
        queries, (k, v, k_tok) = xs
        return jax.lax.map(lambda x: query_block(x, (k, v.swapaxes(1, 2), k_tok)), queries)

    queries, keys = _blocks(q, k, v, q_tokens, k_tokens, window, block)
    out, lse = jax.lax.map(row, (queries, keys))
    out = _join_queries(out, q.shape)
    lse = _join_queries(lse[:, :, None], (*q.shape[:3], 1))[..., 0]
    return (out, lse), (q, k, v, q_tokens, k_tokens, out, lse)


def _backward(window, block, residuals, cotangents):
    q, k, v, q_tokens, k_tokens, out, lse = residuals
    d_out, d_lse = cotangents
    # nothing comes back from a query that sees nothing, whatever it is given
    blind = jnp.isneginf(lse)
    d_out = jnp.where(blind[..., None], 0.0, d_out)
    d_lse = jnp.where(blind, 0.0, d_lse)
    wide = jnp.promote_types(jnp.float32, q.dtype)
    scale = q.shape[-1] ** -0.5
    # gradient of a score: weight * (d_out . v - delta); a query without keys has weights exp(-inf)
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_lse
    lse = jnp.where(jnp.isfinite(lse), lse, -MASKED)

    def query_block(sums, xs, keys, k_t):
        (q, q_tok, visit), d_out, delta, lse = xs
        (k, v, _) = keys
        q_t = q.T
        d_out_t = d_out.T

        def key_blocks(at, mask, carry):
            dq, dk, dv = carry
            weights = jnp.exp(_scores(q_t, _side_by_side(k, at, 0), mask) * scale - lse)
            d_weights = jnp.matmul(_side_by_side(v, at, 0), d_out_t, preferred_element_type=wide)
            d_scores = (weights * (d_weights - delta)).astype(q.dtype)
            dq = dq + jnp.matmul(_side_by_side(k_t, at, 1), d_scores, preferred_element_type=wide)
            dk = _add(dk, at, jnp.matmul(d_scores, q, preferred_element_type=wide))
            dv = _add(
                dv, at, jnp.matmul(weights.astype(q.dtype), d_out, preferred_element_type=wide)
            )
            return dq, dk, dv

        start = (jnp.zeros(q_t.shape, wide), *sums)
        dq, *sums = _visit(key_blocks, q, q_tok, visit, keys, window, start)
        return tuple(sums), dq

    def row(xs):
        queries, keys = xs
        start = (jnp.zeros(keys[0].shape, wide), jnp.zeros(keys[1].shape, wide))
        k_t = keys[0].swapaxes(1, 2)
        sums, dq = jax.lax.scan(lambda sums, x: query_block(sums, x, keys, k_t), start, queries)
        return dq, *sums

    queries, keys = _blocks(q, k, v, q_tokens, k_tokens, window, block)
    d_out, delta, lse = (
        _query_blocks(x, k.shape[2], min(block, q.shape[1]))
        for x in (d_out.astype(q.dtype), delta[..., None], lse[..., None])
    )
    dq, dk, dv = jax.lax.map(row, ((queries, d_out, delta[..., 0], lse[..., 0]), keys))
    dq = _join_queries(dq, q.shape)
    dk = _join_keys(dk, k.shape)
    dv = _join_keys(dv, v.shape)
    return (
        (dq * scale).astype(q.dtype),
        (dk * scale).astype(k.dtype),
        dv.astype(v.dtype),
        None,
        None,
    )


_blockwise.defvjp(_forward, _backward)


def _visit(step: Callable, q, q_tok: Tokens, visit, keys, window: int | None, carry):
    """``step(numbers of key blocks, their mask, carry)`` for the blocks to visit. A mask is 0 or
    MASKED, [S, M].

    Blocks that are seen whole come first, several side by side, and have None for a mask. Behind
    the barriers a mask is an array that the heads share, not a rule that every score works out
    again.
    """
    count = visit[0]
    whole = visit[1]
    order = visit[2:]
    wide = jnp.promote_types(jnp.float32, q.dtype)
    groups = q.shape[0] // q_tok.order.shape[0]
    together = _together(keys[0].shape[1], order.shape[0])

    def unmasked(index, carry):
        return step([order[index * together + i] for i in range(together)], None, carry)

    def masked(index, carry):
        k_tok = keys[2].map(lambda x: x[order[index], :, None])
        seen = sees(q_tok.map(lambda x: x[None]), k_tok, window)
        mask = jax.lax.optimization_barrier(jnp.where(seen, 0.0, MASKED).astype(wide))
        return step(
            [order[index]], jax.lax.optimization_barrier(jnp.tile(mask, (1, groups))), carry
        )

    steps = whole // together
    carry = jax.lax.fori_loop(0, steps, unmasked, carry)
    return jax.lax.fori_loop(steps * together, count, masked, carry)


def _together(block: int, blocks: int) -> int:
    """How many blocks that are seen whole a step takes."""
    return min(max(1, _TOGETHER // block), blocks)


def _scores(q_t, k, mask):
    """Products [S, M] of k [S, H] and q_t [H, M], not scaled, under a mask [S, M] or under none."""
    scores = jnp.matmul(k, q_t, preferred_element_type=jnp.promote_types(jnp.float32, q_t.dtype))
    return scores if mask is None else scores + mask


def _side_by_side(blocks, at, axis):
    """Blocks by their numbers, as one along an axis."""
    return jnp.concatenate([blocks[number] for number in at], axis)


def _add(blocks, at, update):
    """Adds to blocks by their numbers what lies side by side in ``update``."""
    for number, part in zip(at, jnp.split(update, len(at)), strict=True):
        blocks = blocks.at[number].add(part)
    return blocks


def _blocks(q, k, v, q_tokens, k_tokens, window, block):
    """((q, its tokens, the key blocks each query block visits), (k, v, their tokens)), cut into
    blocks, [R, ...].
    """
    # few queries, as of a question, are one small block
    heads = k.shape[2]
    rows = min(block, q.shape[1])
    q_tokens = pad_tokens(q_tokens, rows)
    k_tokens = pad_tokens(k_tokens, block)
    lists, _ = visits(q_tokens, k_tokens, rows, block, window)

    def cut(tokens, size):
        return tokens.map(lambda x: jnp.repeat(x.reshape(x.shape[0], -1, size), heads, axis=0))

    queries = (_query_blocks(q, heads, rows), cut(q_tokens, rows), jnp.repeat(lists, heads, axis=0))
    return queries, (_key_blocks(k, block), _key_blocks(v, block), cut(k_tokens, block))


def _query_blocks(x, num_kv_heads, block):
    """[B, T, N, H] -> [R, blocks, M, H]."""
    batch, _, num_heads, size = x.shape
    x = pad(x, block).reshape(batch, -1, block, num_kv_heads, num_heads // num_kv_heads, size)
    return x.transpose(0, 3, 1, 4, 2, 5).reshape(batch * num_kv_heads, x.shape[1], -1, size)


def _key_blocks(x, block):
    """[B, S, K, H] -> [R, blocks, block, H]."""
    batch, _, heads, size = x.shape
    return pad(x, block).transpose(0, 2, 1, 3).reshape(batch * heads, -1, block, size)


def _join_queries(x, shape):
    """[R, blocks, H, M] -> [B, T, N, H], the shape given."""
    (_, blocks, size, _) = x.shape
    (batch, length, num_heads, _) = shape
    heads = x.shape[0] // batch
    x = x.reshape(batch, heads, blocks, size, num_heads // heads, -1).transpose(0, 2, 5, 1, 4, 3)
    return x.reshape(batch, -1, num_heads, size)[:, :length]


def _join_keys(x, shape):
    """[R, blocks, block, H] -> [B, S, K, H], the shape given."""
    batch, length, heads, size = shape
    return x.reshape(batch, heads, -1, size).transpose(0, 2, 1, 3)[:, :length]
