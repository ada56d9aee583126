"""Attention over chosen blocks, written as its definition, for comparison with the kernels.

Every query's keys are copied side by side. Runs in float64 too.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.finite import by_mask


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    picks: jax.Array,
    q_order: jax.Array,
    k_order: jax.Array,
    *,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of q [B, T, N, H] over the chosen blocks of k, v [B, S, K, H], as
    ``selected_attention``.

    Returns (out [B, T, N, H] in v's dtype, lse [B, T, N] in float32 or wider); 0 and -inf where
    nothing is seen. Differentiable by JAX in both.
    """
    chosen = jnp.any(picks[..., None] == jnp.arange(k.shape[1] // size), axis=-2)
    mask = jnp.repeat(chosen, size, axis=-1) & (k_order[:, None] <= q_order[..., None])[:, :, None]
    mask = mask.swapaxes(1, 2).reshape(q.shape[0], k.shape[2], -1, q.shape[1], k.shape[1])
    attend = functools.partial(_attention, size=size)
    return by_mask(attend, q, k, v, mask, picks, q_order, k_order)


def _attention(q, k, v, _, picks, q_order, k_order, *, size: int):
    wide = jnp.promote_types(jnp.float32, q.dtype)
    groups = q.shape[2] // k.shape[2]
    picks = jnp.repeat(picks, q.shape[2] // picks.shape[2], axis=2)

    def head(q, k, v, picks, q_order, k_order):
        """q [T, H], k and v [S, H], picks [T, n] -> (out [T, H], lse [T])."""
        places = (picks[..., None] * size + jnp.arange(size)).reshape(picks.shape[0], -1)
        mask = jnp.repeat(picks >= 0, size, axis=1) & (k_order[places] <= q_order[:, None])
        seen = mask.any(axis=1)
        q = jnp.where(seen[:, None], q, 0)  # one that sees nothing may hold anything
        scores = jnp.einsum(
            "th,tsh->ts", q, k[places], preferred_element_type=wide, precision="highest"
        )
        # a row that sees nothing keeps finite scores up to the last step, so that its gradient is 0
        # and not NaN
        scores = jnp.where(mask | ~seen[:, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = (jnp.exp(scores - lse[:, None]) * seen[:, None]).astype(v.dtype)
        out = jnp.einsum(
            "ts,tsh->th", weights, v[places], preferred_element_type=wide, precision="highest"
        )
        out = jnp.where(seen[:, None], out, 0.0)
        return out.astype(v.dtype), jnp.where(seen, lse, -jnp.inf)

    heads = jax.vmap(head, in_axes=(1, 1, 1, 1, None, None), out_axes=1)
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    return jax.vmap(heads)(q, k, v, picks, q_order, k_order)
