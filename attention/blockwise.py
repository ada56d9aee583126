"""Dense attention in blocks of queries and keys, in XLA: no array of all scores, and only blocks with a visible pair.

FlashAttention-2 (2307.08691) with scores laid out keys by queries. On CPU every product of the backward pass then reads
its operands in the order in which they lie, where queries by keys have two that do not and run at a third of the speed;
and the mask is written down once for a block and all its heads. With gradients this takes half to two thirds of the
time of ``dense_attention``, on rows of 256 tokens as of 8,192.

Rows are taken one after another, so that each visits only the blocks it needs; the caller shards rows and heads.

Dimensions: B rows, T queries, S keys, N query heads, K key/value heads, G = N / K, H head size, M = G times the queries
of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import dense
from pallas_kernels.flash.blocks import visits
from pallas_kernels.padding import pad, pad_tokens
from pallas_kernels.tokens import MASKED, Tokens, sees


def block_size(keys: int, window: int | None) -> int:
    """Tokens of a block: for short rows fewer than elsewhere, since they are mostly edges of what is seen."""
    return 64 if keys < 2048 else dense.block_size(keys, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def blockwise_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_tokens: Tokens,
    k_tokens: Tokens,
    window: int | None,
    block: int,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) as ``dense_attention``, differentiable in both. block: tokens of a block of queries and of keys."""
    return _forward(q, k, v, q_tokens, k_tokens, window, block)[0]


def _forward(q, k, v, q_tokens, k_tokens, window, block):
    wide, scale = jnp.promote_types(jnp.float32, q.dtype), q.shape[-1] ** -0.5

    def query_block(xs, keys):
        q, q_tok, visit = xs
        k, v_t, _ = keys

        def key_block(at, mask, carry):
            top, total, acc = carry
            scores = _scores(q, k[at], mask)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            weights = jnp.exp((scores - new_top[:, None]) * scale)
            shrink = jnp.exp((top - new_top) * scale)
            total = total * shrink + jnp.sum(weights, axis=1)
            out = jnp.einsum("KHS,KSM->KHM", v_t[at], weights.astype(v_t.dtype), preferred_element_type=wide)
            return new_top, total, acc * shrink[:, None] + out

        # above MASKED, so that a masked score weighs nothing even before a visible key was met
        top = jnp.full(q.shape[:2], MASKED / 2, wide)
        start = (top, jnp.zeros_like(top), jnp.zeros(q.swapaxes(1, 2).shape, wide))
        top, total, acc = _visit(key_block, q, q_tok, visit, keys, window, start)
        blind = total == 0.0  # and not total > 0, by which NaN would pass for nothing seen
        out = acc * jnp.where(blind, 0.0, 1.0 / total)[:, None]
        return out.astype(v.dtype), jnp.where(blind, -jnp.inf, jnp.log(total) + top * scale)

    def row(xs):
        queries, (k, v, k_tok) = xs
        return jax.lax.map(lambda x: query_block(x, (k, v.swapaxes(2, 3), k_tok)), queries)

    queries, keys = _blocks(q, k, v, q_tokens, k_tokens, window, block)
    out, lse = jax.lax.map(row, (queries, keys))
    out, lse = _join_queries(out, q.shape), _join_queries(lse[:, :, :, None], (*q.shape[:3], 1))[..., 0]
    return (out, lse), (q, k, v, q_tokens, k_tokens, out, lse)


def _backward(window, block, residuals, cotangents):
    q, k, v, q_tokens, k_tokens, out, lse = residuals
    d_out, d_lse = cotangents
    wide, scale = jnp.promote_types(jnp.float32, q.dtype), q.shape[-1] ** -0.5
    # gradient of a score: weight * (d_out . v - delta); a query without keys has weights exp(-inf)
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_lse
    lse = jnp.where(jnp.isfinite(lse), lse, -MASKED)

    def query_block(sums, xs, keys, k_t):
        (q, q_tok, visit), d_out, delta, lse = xs
        k, v, _ = keys

        def key_block(at, mask, carry):
            dq, dk, dv = carry
            weights = jnp.exp(_scores(q, k[at], mask) * scale - lse[:, None])
            d_weights = jnp.einsum("KSH,KMH->KSM", v[at], d_out, preferred_element_type=wide)
            d_scores = (weights * (d_weights - delta[:, None])).astype(q.dtype)
            dq = dq + jnp.einsum("KHS,KSM->KHM", k_t[at], d_scores, preferred_element_type=wide)
            dk = dk.at[at].add(jnp.einsum("KSM,KMH->KSH", d_scores, q, preferred_element_type=wide))
            weights = weights.astype(q.dtype)
            dv = dv.at[at].add(jnp.einsum("KSM,KMH->KSH", weights, d_out, preferred_element_type=wide))
            return dq, dk, dv

        start = (jnp.zeros(q.swapaxes(1, 2).shape, wide), *sums)
        dq, *sums = _visit(key_block, q, q_tok, visit, keys, window, start)
        return tuple(sums), dq

    def row(xs):
        queries, keys = xs
        start = (jnp.zeros(keys[0].shape, wide), jnp.zeros(keys[1].shape, wide))
        k_t = keys[0].swapaxes(2, 3)
        sums, dq = jax.lax.scan(lambda sums, x: query_block(sums, x, keys, k_t), start, queries)
        return dq, *sums

    queries, keys = _blocks(q, k, v, q_tokens, k_tokens, window, block)
    d_out, delta, lse = (
        _query_blocks(x, k.shape[2], min(block, q.shape[1]))
        for x in (d_out.astype(q.dtype), delta[..., None], lse[..., None])
    )
    dq, dk, dv = jax.lax.map(row, ((queries, d_out, delta[..., 0], lse[..., 0]), keys))
    dq, dk, dv = _join_queries(dq, q.shape), _join_keys(dk, k.shape[1]), _join_keys(dv, v.shape[1])
    return (dq * scale).astype(q.dtype), (dk * scale).astype(k.dtype), dv.astype(v.dtype), None, None


blockwise_attention.defvjp(_forward, _backward)


def _visit(step: Callable, q, q_tok: Tokens, visit, keys, window: int | None, carry):
    """``step(number of a key block, its mask, carry)`` for the blocks to visit. A mask is 0 or MASKED, [S, M].

    Blocks that are seen whole come first and have None for a mask. Behind the barriers a mask is an array that the
    heads share, not a rule that every score works out again.
    """
    count, whole, order = visit[0], visit[1], visit[2:]
    wide = jnp.promote_types(jnp.float32, q.dtype)
    groups = q.shape[1] // q_tok.order.shape[0]

    def masked(index, carry):
        k_tok = keys[2].map(lambda x: x[order[index], :, None])
        seen = sees(q_tok.map(lambda x: x[None]), k_tok, window)
        mask = jax.lax.optimization_barrier(jnp.where(seen, 0.0, MASKED).astype(wide))
        return step(order[index], jax.lax.optimization_barrier(jnp.tile(mask, (1, groups))), carry)

    carry = jax.lax.fori_loop(0, whole, lambda index, carry: step(order[index], None, carry), carry)
    return jax.lax.fori_loop(whole, count, masked, carry)


def _scores(q, k, mask):
    """Products [K, S, M] of k [K, S, H] and q [K, M, H], not scaled, under a mask [S, M] or under none."""
    wide = jnp.promote_types(jnp.float32, q.dtype)
    scores = jnp.einsum("KSH,KMH->KSM", k, q, preferred_element_type=wide)
    return scores if mask is None else scores + mask


def _blocks(q, k, v, q_tokens, k_tokens, window, block):
    """((q, its tokens, the key blocks that each query block visits), (k, v, their tokens)), cut into blocks."""
    rows = min(block, q.shape[1])  # few queries, as of a question, are one small block
    q_tokens, k_tokens = pad_tokens(q_tokens, rows), pad_tokens(k_tokens, block)
    lists, _ = visits(q_tokens, k_tokens, rows, block, window)

    def cut(tokens, size):
        return tokens.map(lambda x: x.reshape(x.shape[0], -1, size))

    queries = (_query_blocks(q, k.shape[2], rows), cut(q_tokens, rows), lists)
    return queries, (_key_blocks(k, block), _key_blocks(v, block), cut(k_tokens, block))


def _query_blocks(x, num_kv_heads, block):
    """[B, T, N, H] -> [B, blocks, K, M, H]."""
    batch, _, num_heads, size = x.shape
    x = pad(x, block).reshape(batch, -1, block, num_kv_heads, num_heads // num_kv_heads, size)
    return x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, x.shape[1], num_kv_heads, -1, size)


def _key_blocks(x, block):
    """[B, S, K, H] -> [B, blocks, K, block, H]."""
    batch, _, heads, size = x.shape
    return pad(x, block).reshape(batch, -1, block, heads, size).transpose(0, 1, 3, 2, 4)


def _join_queries(x, shape):
    """[B, blocks, K, H, M] -> [B, T, N, H], the shape given."""
    batch, blocks, heads, size, _ = x.shape
    x = x.reshape(batch, blocks, heads, size, shape[2] // heads, -1).transpose(0, 1, 5, 2, 4, 3)
    return x.reshape(batch, -1, *shape[2:])[:, : shape[1]]


def _join_keys(x, length):
    """[B, blocks, K, block, H] -> [B, S, K, H]."""
    batch, blocks, heads, block, size = x.shape
    return x.transpose(0, 1, 3, 2, 4).reshape(batch, blocks * block, heads, size)[:, :length]
