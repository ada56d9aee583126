"""Dense grouped-query attention: all keys that a query may see, perhaps the last ``window`` of them
only.

``dense_attention`` is exact softmax attention, by ``pallas_kernels.flash`` where that can run.
Elsewhere it runs in XLA in blocks, as FlashAttention-2 (2307.08691) orders it: no array of all
scores, and blocks without a visible pair are not visited, so that packed rows, windows, documents
and prompts shared by a group cost what they see. It also returns the log-sum-exp of each query's
scores, differentiable, by which results over different keys merge (``softmax.merge``). Short rows
are one block and keep their scores for the backward pass instead.

Dimensions: B rows, T queries, S keys, N query heads, K key/value heads, G = N / K, H head size.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.flash.api import flash_attention
from pallas_kernels.flash.blocks import visits
from pallas_kernels.padding import pad, pad_tokens
from pallas_kernels.softmax import masked_attention
from pallas_kernels.tokens import MASKED, Tokens, visible

# Rows of at most this many keys are one block whose scores are kept for the backward pass.
DIRECT = 1024
# The implementation that is no kernel.
XLA = "xla"


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
    chooses.

    Returns (out in v's dtype, lse): a query that sees no key has out 0 and lse -inf.
    """
    check_heads(q, k)

    def in_xla():
        if block is None and k.shape[1] <= DIRECT:
            return masked_attention(q, k, v, visible(q_tokens, k_tokens, window))
        return _blockwise(
            q, k, v, q_tokens, k_tokens, window, block or block_size(k.shape[1], window)
        )

    if implementation == XLA or block is not None:
        return in_xla()
    choice = dict(implementation=implementation, interpret=interpret, fallback=in_xla)
    return flash_attention(q, k, v, q_tokens, k_tokens, window=window, **choice)


def block_size(keys: int, window: int | None) -> int:
    """Tokens of a block: few enough that what is computed in vain stays small, many enough for
    large products.
    """
    least, part = (64, window // 8) if window else (128, keys // 16)
    return min(max(least, part), 512)


def check_heads(q: jax.Array, k: jax.Array) -> None:
    """Raises ValueError unless the query heads are a multiple of the key/value heads."""
    num_heads = q.shape[2]
    num_kv_heads = k.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")


# --- In blocks ------------------------------------------------------------------------------------
#
# Rows are taken one after another, so that each visits only the blocks it needs; the caller shards
# rows and heads.


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _blockwise(q, k, v, q_tokens, k_tokens, window, block):
    return _forward(q, k, v, q_tokens, k_tokens, window, block)[0]


def _forward(q, k, v, q_tokens, k_tokens, window, block):
    heads = k.shape[2]
    wide = jnp.promote_types(jnp.float32, q.dtype)
    scale = q.shape[-1] ** -0.5

    def query_block(xs):
        (q, q_tok, keys, count), (k, v, k_tok) = xs

        def key_block(index, carry):
            top, total, acc = carry
            at = keys[index]
            scores = _scores(q, k[at], q_tok, k_tok.map(lambda x: x[at]), window, scale)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            total = total * shrink + jnp.sum(weights, axis=-1)
            acc = acc * shrink[..., None] + _weighted(weights, v[at])
            return new_top, total, acc

        rows = (heads, q.shape[1] // q_tok.order.shape[0], q_tok.order.shape[0])
        # above MASKED, so that a masked score weighs nothing even before a visible key was met
        start = (
            jnp.full(rows, MASKED / 2, wide),
            jnp.zeros(rows, wide),
            jnp.zeros((*rows, q.shape[-1]), wide),
        )
        top, total, acc = jax.lax.fori_loop(0, count, key_block, start)
        blind = total == 0  # and not total > 0, by which NaN would pass for nothing seen
        out = acc * jnp.where(blind, 0, 1 / total)[..., None]
        return out.astype(v.dtype), jnp.where(blind, -jnp.inf, jnp.log(total) + top)

    def row(xs):
        queries, keys = xs
        return jax.lax.map(lambda x: query_block((x, keys)), queries)

    queries, keys = _blocks(q, k, v, q_tokens, k_tokens, window, block)
    out, lse = jax.lax.map(row, (queries, keys))  # [B, blocks, K, G, block(, H)]
    out = _rows(out, q.shape[1])
    lse = _rows(lse[..., None], q.shape[1])[..., 0]
    return (out, lse), (q, k, v, q_tokens, k_tokens, out, lse)


def _backward(window, block, residuals, cotangents):
    q, k, v, q_tokens, k_tokens, out, lse = residuals
    d_out, d_lse = cotangents
    wide = jnp.promote_types(jnp.float32, q.dtype)
    scale = q.shape[-1] ** -0.5
    # gradient of a score: weight * (d_out . v - delta); a query without keys has weights exp(-inf)
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_lse
    lse = jnp.where(jnp.isfinite(lse), lse, -MASKED)

    def query_block(sums, xs, k, v, k_tok):
        (q, q_tok, keys, count), d_out, delta, lse = xs

        def key_block(index, carry):
            dq, dk, dv = carry
            at = keys[index]
            weights = jnp.exp(
                _scores(q, k[at], q_tok, k_tok.map(lambda x: x[at]), window, scale) - lse
            )
            d_weights = jnp.einsum(
                "KTH,KSH->KTS", d_out, v[at], preferred_element_type=wide
            ).reshape(weights.shape)
            flat = (weights.shape[0], -1, weights.shape[-1])
            d_scores = (weights * (d_weights - delta) * scale).reshape(flat).astype(q.dtype)
            weights = weights.reshape(flat).astype(q.dtype)
            dq = dq + jnp.einsum("KTS,KSH->KTH", d_scores, k[at], preferred_element_type=wide)
            dk = dk.at[at].add(jnp.einsum("KTS,KTH->KSH", d_scores, q, preferred_element_type=wide))
            dv = dv.at[at].add(
                jnp.einsum("KTS,KTH->KSH", weights, d_out, preferred_element_type=wide)
            )
            return dq, dk, dv

        dq, *sums = jax.lax.fori_loop(0, count, key_block, (jnp.zeros(q.shape, wide), *sums))
        return tuple(sums), dq

    def row(xs):
        queries, (k, v, k_tok) = xs
        start = (jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide))
        sums, dq = jax.lax.scan(lambda sums, x: query_block(sums, x, k, v, k_tok), start, queries)
        return dq, *sums

    queries, keys = _blocks(q, k, v, q_tokens, k_tokens, window, block)
    rows = min(block, q.shape[1])
    shape = (*queries[0].shape[:3], q.shape[2] // k.shape[2], -1, 1)  # [B, blocks, K, G, block, 1]
    d_out = _query_blocks(d_out.astype(q.dtype), k.shape[2], rows)
    delta, lse = (
        _query_blocks(x[..., None], k.shape[2], rows).reshape(shape) for x in (delta, lse)
    )
    dq, dk, dv = jax.lax.map(row, ((queries, d_out, delta, lse), keys))
    dq = _rows(dq.reshape(*shape[:-1], q.shape[-1]), q.shape[1])
    dk, dv = (_key_rows(x, k.shape[1]) for x in (dk, dv))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_blockwise.defvjp(_forward, _backward)


def _scores(q, k, q_tok: Tokens, k_tok: Tokens, window, scale):
    """Masked scores [K, G, T, S] of q [K, G T, H] and k [K, S, H], whose tokens' fields are [T] and
    [S].
    """
    wide = jnp.promote_types(jnp.float32, q.dtype)
    scores = jnp.einsum("KTH,KSH->KTS", q, k, preferred_element_type=wide) * scale
    mask = visible(q_tok.map(lambda x: x[None]), k_tok.map(lambda x: x[None]), window)[0]
    scores = scores.reshape(q.shape[0], -1, *mask.shape)
    return scores + jnp.where(mask, 0.0, MASKED).astype(wide)


def _weighted(weights, v):
    """Weights [K, G, T, S] times v [K, S, H] -> [K, G, T, H]."""
    flat = weights.reshape(weights.shape[0], -1, weights.shape[-1]).astype(v.dtype)
    out = jnp.einsum("KTS,KSH->KTH", flat, v, preferred_element_type=weights.dtype)
    return out.reshape(*weights.shape[:-1], v.shape[-1])


def _blocks(q, k, v, q_tokens, k_tokens, window, block):
    """((q, its tokens, the key blocks each query block visits, how many), (k, v, their tokens)),
    cut into blocks.
    """
    # few queries, as of a question, are one small block
    heads = k.shape[2]
    rows = min(block, q.shape[1])
    q_tokens = pad_tokens(q_tokens, rows)
    k_tokens = pad_tokens(k_tokens, block)
    lists, _ = visits(q_tokens, k_tokens, rows, block, window)

    def cut(x, size):
        return x.reshape(x.shape[0], -1, size)

    q_cut = q_tokens.map(lambda x: cut(x, rows))
    k_cut = k_tokens.map(lambda x: cut(x, block))
    queries = (_query_blocks(q, heads, rows), q_cut, lists[..., 2:], lists[..., 0])
    return queries, (_key_blocks(k, block), _key_blocks(v, block), k_cut)


def _query_blocks(x, num_kv_heads, block):
    """[B, T, N, H] -> [B, blocks, K, G block, H]."""
    batch, _, num_heads, size = x.shape
    x = pad(x, block).reshape(batch, -1, block, num_kv_heads, num_heads // num_kv_heads, size)
    return x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, x.shape[1], num_kv_heads, -1, size)


def _key_blocks(x, block):
    """[B, S, K, H] -> [B, blocks, K, block, H]."""
    batch, _, heads, size = x.shape
    return pad(x, block).reshape(batch, -1, block, heads, size).transpose(0, 1, 3, 2, 4)


def _rows(x, length):
    """[B, blocks, K, G, block, H] -> [B, T, N, H]."""
    batch, blocks, heads, groups, block, size = x.shape
    return x.transpose(0, 1, 4, 2, 3, 5).reshape(batch, blocks * block, heads * groups, size)[
        :, :length
    ]


def _key_rows(x, length):
    """[B, blocks, K, block, H] -> [B, S, K, H]."""
    batch, blocks, heads, block, size = x.shape
    return x.transpose(0, 1, 3, 2, 4).reshape(batch, blocks * block, heads, size)[:, :length]
