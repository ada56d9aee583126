"""Values that are not finite reach those queries that see them, and no others.

A key that a query does not see has weight 0, and 0 times NaN is NaN. Products that sum over tokens
(weights times values, and three of the backward pass) would therefore carry one bad token to every
query and key that lies in a block with it. So these products only get finite operands. What is bad
is told by scores instead: a score belongs to one query and one key, and a mask drops it.

- Forward, a key has a NaN where it or its value is not finite, and values are finite
  (``guarded``). The scores of those who see the key are NaN, and so are their results and
  log-sum-exps.
- Backward, all operands are finite (``cleaned``, ``cotangents``). The log-sum-exp of a bad query is
  POISON: the weights of all keys that it sees are then infinite, and infinity times 0 is NaN. The
  weights of other keys stay 0.

A bad query is one whose result or cotangent is not finite. It is left out where its cotangent is 0:
nobody uses its result.

Dimensions: B rows, T queries, S keys, N query heads, K key/value heads, G = N / K, H head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.padding import zeros_unless
from pallas_kernels.tokens import MASKED

# The log-sum-exp of a query for the backward pass: every weight is exp(score - lse). A score that
# is masked is MASKED, or MASKED times the scale of scores; both are far below POISON.
NOTHING = -MASKED
POISON = -1e20


def cleaned(x: jax.Array) -> jax.Array:
    """x with zeros in place of what is not finite."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


@jax.custom_vjp
def marked(x: jax.Array, bad: jax.Array) -> jax.Array:
    """x [..., H] with NaN where bad [...] is True. Its gradient is that of x."""
    return jnp.where(bad[..., None], jnp.nan, x)


marked.defvjp(lambda x, bad: (marked(x, bad), None), lambda _, d: (d, None))


def kept(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(k, v) [..., H] with finite values, and keys with a NaN where either was not finite."""
    good = jnp.isfinite(v)
    if k.shape != v.shape:
        good = jnp.all(good, axis=-1, keepdims=True)
    # else element by element: one NaN of a key is enough, and to look at all elements of a value at
    # once would take a kernel of its own on GPU
    return jnp.where(jnp.isfinite(k) & good, k, jnp.asarray(jnp.nan, k.dtype)), cleaned(v)


@jax.custom_vjp
def guarded(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    real_q: jax.Array | None,
    real_k: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q, k, v) as kernels and blocks take them: q [B, T, N, H], k and v [B, S, K, H].

    real_q [B, T], real_k [B, S]: False for places that may hold anything, which become zeros. None
    where such queries are never read. It is done once for each call, where XLA fuses it with what
    computes q, k and v.
    """
    q = jnp.where(jnp.isfinite(q), q, jnp.asarray(jnp.nan, q.dtype))
    k, v = (_zeros_unless(x, real_k) for x in kept(k, v))
    return _zeros_unless(q, real_q), k, v


def _guarded_forward(q, k, v, real_q, real_k):
    return guarded(q, k, v, real_q, real_k), (real_q, real_k)


def _guarded_backward(real, cotangents):
    real_q, real_k = real
    dq, dk, dv = cotangents
    dk, dv = (_zeros_unless(x, real_k) for x in (dk, dv))
    return _zeros_unless(dq, real_q), dk, dv, None, None


guarded.defvjp(_guarded_forward, _guarded_backward)


def _zeros_unless(x: jax.Array, real: jax.Array | None) -> jax.Array:
    return x if real is None else zeros_unless(x, real)


def cotangents(
    out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(d_out, delta, lse) of every query for the backward pass of attention in blocks.

    out, d_out: [B, T, N, H]. lse, d_lse: [B, T, N], -inf for a query that sees nothing. delta:
    d_out . out - d_lse, in float32 or wider; the gradient of a score is weight (d_out . v - delta).
    A query that sees nothing passes no gradient on, whatever its cotangent is, NaN included.
    """
    wide = jnp.promote_types(jnp.float32, lse.dtype)
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_lse
    # the sum is finite only if all that it is made of is; a sum that overflows is no better
    good = jnp.isfinite(delta) & jnp.isfinite(lse)
    silent = jnp.isneginf(lse) | _idle(d_out, d_lse)
    d_out = jnp.where(good[..., None], d_out, jnp.zeros((), d_out.dtype))
    delta = jnp.where(good, delta, 0.0)
    return d_out, delta, jnp.where(good, lse, jnp.where(silent, NOTHING, POISON))


def _idle(d_out: jax.Array, d_lse: jax.Array) -> jax.Array:
    """True where nobody uses the result of a query, [B, T, N]."""
    return jnp.all(d_out == 0, axis=-1) & (d_lse == 0)


# --- With a mask in memory ------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_mask(
    attend: Callable[..., tuple], q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array,
    *others: Any,
) -> tuple:  # fmt: skip
    """attend(q, k, v, mask, *others) of finite q, k and v, with NaN where a query sees what is not.

    attend: a function that returns (out [B, T, N, H], lse [B, T, N], *rest), with lse -inf for a
      query that sees nothing. Its gradients are JAX's own; there are none through rest.
    mask: bool [B, 1 or K, 1 or G, T, S], who sees whom.
    """
    out, lse, *rest = attend(cleaned(q), cleaned(k), cleaned(v), mask, *others)
    return _show(out, lse, _sees_bad(q, k, v, mask), rest)


def _by_mask_forward(attend, q, k, v, mask, *others):
    def run(q, k, v):
        out, lse, *rest = attend(q, k, v, mask, *others)
        return (out, lse), rest

    (out, lse), pull, rest = jax.vjp(run, cleaned(q), cleaned(k), cleaned(v), has_aux=True)
    bad = _sees_bad(q, k, v, mask)
    residuals = pull, bad, mask, tuple(None for _ in others)
    return _show(out, lse, bad, rest), residuals


def _by_mask_backward(attend, residuals, cotangents):
    pull, bad, mask, nothing = residuals
    d_out, d_lse, *_ = cotangents
    good = ~bad & jnp.all(jnp.isfinite(d_out), axis=-1) & jnp.isfinite(d_lse)
    used = ~_idle(d_out, d_lse)
    d_out = jnp.where(good[..., None], d_out, jnp.zeros((), d_out.dtype))
    dq, dk, dv = pull((d_out, jnp.where(good, d_lse, 0.0)))
    bad = ~good & used & _seeing(mask, dq.shape, dk.shape[2])
    by_head = bad.reshape(*bad.shape[:2], dk.shape[2], -1).transpose(0, 2, 3, 1)[..., None]
    bad_keys = _any(mask, by_head, (2, 3)).swapaxes(1, 2)  # [B, S, K]
    return marked(dq, bad), marked(dk, bad_keys), marked(dv, bad_keys), None, *nothing


by_mask.defvjp(_by_mask_forward, _by_mask_backward)


def _show(out, lse, bad, rest) -> tuple:
    return marked(out, bad), jnp.where(bad, jnp.nan, lse), *rest


def _sees_bad(q, k, v, mask) -> jax.Array:
    """bool [B, T, N], True where a query is not finite and sees something, or sees what is not."""
    bad_q = ~jnp.all(jnp.isfinite(q), axis=-1)
    bad_k = ~jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1)
    found = _any(mask, bad_k.swapaxes(1, 2)[:, :, None, None], (4,))
    return (bad_q & _seeing(mask, q.shape, k.shape[2])) | _by_query(found, q.shape, k.shape[2])


def _seeing(mask: jax.Array, shape: tuple[int, ...], kv_heads: int) -> jax.Array:
    """True where a query sees anything, [B, T, N] of a shape [B, T, N, H]."""
    # not by the log-sum-exp: who only wants gradients of out does not compute it
    return _by_query(jnp.any(mask, axis=-1), shape, kv_heads)


def _by_query(x: jax.Array, shape: tuple[int, ...], kv_heads: int) -> jax.Array:
    """[B, 1 or K, 1 or G, T] -> [B, T, N] of a shape [B, T, N, H]."""
    batch, queries, heads, _ = shape
    x = jnp.broadcast_to(x, (batch, kv_heads, heads // kv_heads, queries))
    return x.transpose(0, 3, 1, 2).reshape(batch, queries, heads)


def _any(mask: jax.Array, bad: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """jnp.any(mask & bad, axes), at no cost where nothing is bad."""
    # of the result's shape and, in a shard_map, of its kind
    nothing = jnp.any(mask, axes) & jnp.any(bad, axes) & False
    return jax.lax.cond(jnp.any(bad), lambda: jnp.any(mask & bad, axes), lambda: nothing)
