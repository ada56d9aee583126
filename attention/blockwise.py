"""Softmax attention to every key that a query may see, or to the last ``window`` of them only.

``dense_attention`` runs the kernel of ``pallas_kernels.flash`` where it can. In XLA there are two
ways. Short rows keep all their scores for the backward pass. Longer rows run in blocks of queries
and keys. There is then never an array of all scores, and a pair of blocks without a visible pair of
tokens is not visited. Packed rows, windows, documents and prompts shared by a group therefore cost
only what they see. All return the log-sum-exp of each query's scores too. It is differentiable, and
results over different keys are merged by it (``softmax.merge``).

The blocks follow FlashAttention-2 (2307.08691). Scores are laid out keys by queries. On CPU every
product of the backward pass then reads its operands in the order in which they lie in memory; with
queries by keys two products do not, and run at a third of the speed. The mask of a block is
computed once and shared by the heads.

Rows and key/value heads are taken one after another. A row then visits only the blocks that it
needs, and every product is one of two matrices: on CPU a batched product of two pairs takes about
twice as long as the two products alone. The caller shards rows and heads.

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

from pallas_kernels import choice
from pallas_kernels.finite import cleaned, cotangents, guarded
from pallas_kernels.flash.api import flash_attention
from pallas_kernels.flash.blocks import visits
from pallas_kernels.padding import pad, pad_tokens
from pallas_kernels.saved import attended
from pallas_kernels.softmax import masked_attention
from pallas_kernels.tokens import MASKED, Tokens, sees, visible

# Rows of at most this many keys are one block whose scores are kept for the backward pass.
DIRECT = 1024
# On CPU, whole rows of at most this many keys are faster with all their scores in memory.
SHORT = 128
# The implementation that is no kernel.
XLA = "xla"
# Keys that one step takes together, from several smaller blocks that are seen whole. A product of
# this size runs at full speed, and its operands stay in a core's cache.
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

    N must be a multiple of K; query head n reads key/value head n // (N / K).

    window: see ``visible``.
    block: for "xla", tokens of a block of queries and of keys. None chooses a size, and keeps all
      scores of rows of at most DIRECT keys.
    implementation: "xla", the name of a kernel as for ``flash_attention``, or None for a kernel
      where one can run.

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
    """``dense_attention`` that on CPU never keeps all scores of a row, however short it is.

    On an accelerator without a kernel for the input, short rows keep them: their small blocks, one
    after another, would leave the device idle.
    """

    def in_blocks():
        if choice.here() != "cpu" and k.shape[1] <= DIRECT:
            return masked_attention(q, k, v, visible(q_tokens, k_tokens, window))
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
    """Tokens of a block, for rows of so many keys.

    Small blocks compute little that nobody sees; large blocks make large products. Short rows have
    the smallest blocks, since most of their blocks lie on the edge of what is seen.
    """
    if keys < 2048:
        return 64
    least, part = (64, window // 8) if window else (128, keys // 16)
    return min(max(least, part), 512)


def mean_trips(tokens: Tokens, window: int | None, block: int) -> float:
    """The mean number of trips of the loops over a query block's key blocks, for counting FLOPs.

    There are two loops: a trip of the one without masks takes ``_together`` blocks, a trip of the
    other takes one. A FLOP counter multiplies the bodies of both by the same number of trips. This
    number, a mean over query blocks, makes its total exact.
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
    """(out, lse) as ``dense_attention``, differentiable in both.

    block: tokens of a block of queries and of keys.
    """
    q, k, v = guarded(q, k, v, q_tokens.segments > 0, k_tokens.segments > 0)
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

        # scores and their maximum ``top`` are not scaled; the scale is applied in the exponents
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
        # not ~(total > 0): a NaN must stay visible, and not count as a query that sees nothing
        blind = total == 0.0
        out = acc * jnp.where(blind, 0.0, 1.0 / total)
        return out.astype(v.dtype), jnp.where(blind, -jnp.inf, jnp.log(total) + top * scale)

    def row(xs):
        queries, (k, v, k_tok) = xs
        return jax.lax.map(lambda x: query_block(x, (k, v.swapaxes(1, 2), k_tok)), queries)

    queries, keys = _blocks(q, k, v, q_tokens, k_tokens, window, block)
    out, lse = jax.lax.map(row, (queries, keys))
    out = _join_queries(out, q.shape)
    lse = _join_queries(lse[:, :, None], (*q.shape[:3], 1))[..., 0]
    out, lse = attended(out, lse)
    return (out, lse), (q, k, v, q_tokens, k_tokens, out, lse)


def _backward(window, block, residuals, given):
    q, k, v, q_tokens, k_tokens, out, lse = residuals
    q, k = (cleaned(x) for x in (q, k))
    d_out, delta, lse = cotangents(out, lse, *given)
    wide = jnp.promote_types(jnp.float32, q.dtype)
    scale = q.shape[-1] ** -0.5

    # ``sums`` are dk and dv of all keys of the row, to which every query block adds
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
    """Calls ``step(numbers of key blocks, mask, carry)`` for the blocks on the list ``visit``.

    Blocks that are seen whole come first, several in a step, with None as mask. The others follow
    one by one, with a mask [S, M] of 0 and MASKED. Returns the last carry.
    """
    # a list as ``flash.blocks.visits`` makes it: two counts, then the numbers of the blocks
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
        # The barriers make XLA compute the mask once, as an array that the heads share. Without
        # them it would fuse the rule into the scores and evaluate it for every head.
        mask = jax.lax.optimization_barrier(jnp.where(seen, 0.0, MASKED).astype(wide))
        return step(
            [order[index]], jax.lax.optimization_barrier(jnp.tile(mask, (1, groups))), carry
        )

    # blocks that do not fill a last step of ``together`` go through the second loop, masked
    steps = whole // together
    carry = jax.lax.fori_loop(0, steps, unmasked, carry)
    return jax.lax.fori_loop(steps * together, count, masked, carry)


def _together(block: int, blocks: int) -> int:
    """The number of blocks that a step takes where they are seen whole."""
    return min(max(1, _TOGETHER // block), blocks)


def _scores(q_t, k, mask):
    """Scores [S, M] of k [S, H] and q_t [H, M], not scaled.

    mask: [S, M] of 0 and MASKED, or None. A masked score is MASKED, even where it would be NaN.
    """
    scores = jnp.matmul(k, q_t, preferred_element_type=jnp.promote_types(jnp.float32, q_t.dtype))
    return scores if mask is None else jnp.where(mask < 0, mask, scores)


def _side_by_side(blocks, at, axis):
    """The blocks with the numbers ``at``, joined along an axis."""
    return jnp.concatenate([blocks[number] for number in at], axis)


def _add(blocks, at, update):
    """Adds to each block with a number in ``at`` its part of ``update``, where they are joined."""
    for number, part in zip(at, jnp.split(update, len(at)), strict=True):
        blocks = blocks.at[number].add(part)
    return blocks


def _blocks(q, k, v, q_tokens, k_tokens, window, block):
    """The arguments cut into blocks, [R, ...] each.

    Returns ((q, its tokens, the list of key blocks of each query block), (k, v, their tokens)).
    """
    # a row of few queries, such as a question, is one small block
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
