"""Attention over chosen blocks of keys, shared by NSA and MoBA: every query of a group reads its own list of blocks.

Dimensions: B rows, T queries, S places of keys, N query heads, K key/value heads, G = N / K, H head size, n picks.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.dense import MASKED, check_heads

# Queries taken together: their chosen keys are copied side by side.
QUERIES = 64


def selected_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    picks: Int[Array, "B T P n"],
    q_order: Int[Array, "B T"],
    k_order: Int[Array, "B S"],
    *,
    size: int,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention over the chosen blocks, scores scaled by 1/sqrt(H), in float32 or wider.

    picks: numbers of blocks of ``size`` places, each at most once, -1 for none; P is K where the heads of a group share
    them and N where every head has its own. A place is seen when its order is at most the query's; empty places have an
    order past all others.

    Returns (out in v's dtype, lse) as ``dense_attention``.
    """
    check_heads(q, k)
    if picks.shape[2] not in (k.shape[2], q.shape[2]):
        raise ValueError(f"picks for {picks.shape[2]} heads, expected {k.shape[2]} or {q.shape[2]}")
    row = functools.partial(_row, size=size)
    return jax.lax.map(lambda x: row(*x), (q, k, v, picks, q_order, k_order))


def _row(q, k, v, picks, q_order, k_order, *, size):
    """One row: [T, N, H], [S, K, H], [S, K, H], [T, P, n], [T], [S]."""
    length, num_heads, head_dim = q.shape
    heads = picks.shape[1]
    k, v = (_by_block(x, size, heads) for x in (k, v))  # [P, J, size, H]
    k_order = k_order.reshape(-1, size)

    @jax.checkpoint
    def chunk(xs):
        q, picks, q_order = xs  # [C, P, N / P, H], [P, C, n], [C]
        wide = jnp.promote_types(jnp.float32, q.dtype)
        chosen = jnp.maximum(picks, 0)
        keys, values = (jax.vmap(lambda x, at: x[at])(x, chosen) for x in (k, v))  # [P, C, n, size, H]
        flat = (*chosen.shape[:2], -1, head_dim)
        scores = jnp.einsum("cpgh,pcsh->pcgs", q, keys.reshape(flat), preferred_element_type=wide) * head_dim**-0.5
        seen = (k_order[chosen] <= q_order[None, :, None, None]) & (picks >= 0)[..., None]
        seen = seen.reshape(*seen.shape[:2], 1, -1)
        scores = jnp.where(seen, scores, MASKED)
        top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
        total = jnp.sum(weights, axis=-1)
        any_seen = total > 0
        lse = jnp.where(any_seen, jnp.log(jnp.where(any_seen, total, 1.0)) + top[..., 0], -jnp.inf)
        out = jnp.einsum("pcgs,pcsh->cpgh", weights.astype(v.dtype), values.reshape(flat), preferred_element_type=wide)
        scale = jnp.where(any_seen, 1.0 / jnp.where(any_seen, total, 1.0), 0.0)
        return (out * scale.transpose(1, 0, 2)[..., None]).astype(v.dtype), lse.transpose(1, 0, 2)

    size_c = min(QUERIES, length)
    xs = (q.reshape(length, heads, -1, head_dim), picks, q_order)
    xs = tuple(jnp.pad(x, ((0, -length % size_c),) + ((0, 0),) * (x.ndim - 1)) for x in xs)
    q, picks, q_order = (x.reshape(-1, size_c, *x.shape[1:]) for x in xs)
    out, lse = jax.lax.map(chunk, (q, picks.transpose(0, 2, 1, 3), q_order))
    return out.reshape(-1, num_heads, head_dim)[:length], lse.reshape(-1, num_heads)[:length]


def _by_block(x, size, heads):
    """[S, K, H] -> [P, J, size, H], each key/value head repeated for the query heads that choose on their own."""
    x = x.reshape(-1, size, *x.shape[1:]).transpose(2, 0, 1, 3)
    return jnp.repeat(x, heads // x.shape[0], axis=0)
