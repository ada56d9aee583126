"""The gated delta rule (2412.06464) token by token; ``pallas_kernels.delta`` computes it by chunks.

A state S [key size, value size], float32. With log decay g and rate β of a token,

    S_t = α_t S_{t-1} + k_t ⊗ β_t (v_t - (α_t S_{t-1})ᵀ k_t),    o_t = S_tᵀ q_t,    α_t = exp(g_t).

Dimensions: B rows, T tokens, K key heads, R value heads of a key head, H key size, V value size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def step(
    state: Float[Array, "B K R H V"],
    q: Float[Array, "B K H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K R V"],
    g: Float[Array, "B K R"],
    beta: Float[Array, "B K R"],
) -> tuple[Float[Array, "B K R V"], Float[Array, "B K R H V"]]:
    """One token of the recurrence: (its results, the next state).

    Sums are made by multiplication and addition: every row has the same bits alone or with others.
    """
    state = state * jnp.exp(g)[..., None, None]
    seen = jnp.sum(state * k[:, :, None, :, None], axis=-2)
    change = beta[..., None] * (v - seen)
    state = state + k[:, :, None, :, None] * change[..., None, :]
    return jnp.sum(state * q[:, :, None, :, None], axis=-2), state


def recurrence(q, k, v, g, beta, state):
    """The definition: token by token, (results [B, T, K, R, V], the last state).

    Arguments as of ``step``, with an axis of tokens behind that of the rows.
    """

    def one(state, x):
        out, state = step(state, *x)
        return state, out

    moved = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
    state, out = jax.lax.scan(one, state, moved)
    return jnp.moveaxis(out, 0, 1), state
