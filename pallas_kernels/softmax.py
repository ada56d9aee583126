"""Softmax attention with every score in memory, for few queries or keys, and the merging of results
over different keys.

Dimensions: B rows, T queries, S keys, N query heads, K key/value heads, G = N / K, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.finite import by_mask
from pallas_kernels.tokens import MASKED


def masked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of q [B, T, N, H] over those keys of k, v [B, S, K, H] that a mask leaves.

    mask: bool [B, T, S], or [B, K, T, S] or [B, N, T, S] where it depends on the key/value head or
    the query head. Scores are scaled by 1/sqrt(H), in float32 or wider.

    Returns (out [B, T, N, H] in v's dtype, lse [B, T, N]), differentiable through both. A query
    that sees no key has out 0 and lse -inf. Values that are not finite reach only those that see
    them (``finite``).
    """
    return weighted_attention(q, k, v, mask)[:2]


def weighted_attention(q, k, v, mask):
    """``masked_attention`` with its weights: (out, lse, weights, share).

    weights: [B, K, G, T, S]. share: [B, K, G, T]; weights times share are the probabilities. Both
      are finite and without a gradient.
    """
    shape = (1, 1) if mask.ndim == 3 else (k.shape[2], -1)
    mask = mask.reshape(q.shape[0], *shape, *mask.shape[-2:])
    return by_mask(_weighted_attention, q, k, v, mask)


def _weighted_attention(q, k, v, mask):
    """``weighted_attention`` of finite q, k and v, with a mask [B, 1 or K, 1 or G, T, S]."""
    batch, queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    groups = num_heads // num_kv_heads
    wide = jnp.promote_types(jnp.float32, q.dtype)
    # Head-major batched matrix products and an additive mask: on CPU the gradient runs about 7
    # times faster than with token-major einsums and `where` (16 x 384 tokens, 4 heads).
    seen = jnp.any(mask, axis=-1)
    # keys that nobody sees, and queries that see nothing, may hold anything
    real_k = jnp.any(mask, axis=(2, 3))[..., None]
    real_q = jnp.broadcast_to(seen, (batch, num_kv_heads, groups, queries))
    real_q = real_q.reshape(batch, num_kv_heads, groups * queries, 1)
    q = jnp.where(real_q, _head_major(q, num_kv_heads), jnp.zeros((), q.dtype))
    k = jnp.where(real_k, k.transpose(0, 2, 1, 3), jnp.zeros((), k.dtype))
    v = jnp.where(real_k, v.transpose(0, 2, 1, 3), jnp.zeros((), v.dtype))
    scores = jnp.einsum("BKTH,BKSH->BKTS", q, k, preferred_element_type=wide) * head_dim**-0.5
    bias = jnp.where(mask, 0.0, MASKED).astype(wide)
    scores = scores.reshape(batch, num_kv_heads, groups, queries, -1) + bias
    # the maximum cancels out of all results, so its gradient is 0
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1)
    lse = jnp.where(seen, jnp.log(total) + top[..., 0], -jnp.inf)
    share = jnp.where(seen, 1.0 / total, 0.0)
    flat = weights.reshape(batch, num_kv_heads, groups * queries, -1).astype(v.dtype)
    out = jnp.einsum("BKTS,BKSH->BKTH", flat, v, preferred_element_type=wide)
    out = out.reshape(batch, num_kv_heads, groups, queries, head_dim)
    # a select, and not times a share of 0: XLA on CPU may make NaN of a product of constant zeros,
    # which q, k and v are where a mask is known to be False everywhere when it compiles
    out = jnp.where(seen[..., None], out * share[..., None], 0.0)
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, queries, num_heads, head_dim)
    lse = lse.transpose(0, 3, 1, 2).reshape(batch, queries, num_heads)
    return out.astype(v.dtype), lse, weights, share


def merge(outs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of disjoint sets of keys.

    outs [..., H], lses [...]: the results of attention to each of the sets.
    """
    stacked = jnp.stack(lses)
    # not isfinite: a NaN must stay visible, and not count as a query that sees nothing
    seen = ~jnp.isneginf(stacked)
    lse = jax.nn.logsumexp(jnp.where(seen, stacked, MASKED), axis=0)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, stacked, MASKED) - lse), 0.0)
    out = sum(weight[..., None] * out for weight, out in zip(weights, outs, strict=True))
    return out.astype(outs[0].dtype), jnp.where(jnp.any(seen, axis=0), lse, -jnp.inf)


def _head_major(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> [B, K, G T, H]."""
    batch, length, _, head_dim = x.shape
    x = x.reshape(batch, length, num_kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    return x.reshape(batch, num_kv_heads, -1, head_dim)
