"""Attention as its definition reads, with every score in memory; runs in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.finite import by_mask
from pallas_kernels.tokens import Tokens, visible


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_tokens: Tokens,
    k_tokens: Tokens,
    *,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of q [B, T, N, H] over k, v [B, S, K, H], scores scaled by 1/sqrt(H).

    Returns (out [B, T, N, H] in v's dtype, lse [B, T, N] in float32 or wider); 0 and -inf where
    nothing is seen. Differentiable by JAX in both.
    """
    return by_mask(_attention, q, k, v, visible(q_tokens, k_tokens, window)[:, None, None])


def _attention(q, k, v, mask):
    wide = jnp.promote_types(jnp.float32, q.dtype)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide, precision="highest")
    mask = mask[:, 0]
    seen = mask.any(axis=-1)
    # a row that sees nothing keeps finite scores up to the last step, so that its gradient is 0 and
    # not NaN
    scores = jnp.where(mask | ~seen[..., None], scores * q.shape[-1] ** -0.5, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None]) * seen[..., None]
    out = jnp.einsum(
        "bnts,bsnh->btnh",
        weights.astype(v.dtype),
        v,
        preferred_element_type=wide,
        precision="highest",
    )
    # so that nothing comes back from a query that sees nothing, whatever it is given
    out = jnp.where(seen.transpose(0, 2, 1)[..., None], out, 0.0)
    return out.astype(v.dtype), jnp.where(seen, lse, -jnp.inf).transpose(0, 2, 1)
