"""Attention in blocks with a differentiable log-sum-exp, on TPU, GPU or as plain jnp.

This is FlashAttention-2 (2307.08691) over the pairs of blocks that ``tokens.may_see`` leaves. It
departs from the paper in two points:

- Who sees whom comes from the fields of ``Tokens``, not from positions.
- The log-sum-exp is a result with a gradient of its own. Its cotangent enters the backward pass by
  delta = rowsum(d_out * out) - d_lse. Results over different keys can therefore be merged by their
  log-sum-exps, and the merged result can be trained.

Dimensions: B rows, T queries, S keys, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.choice import (
    REFERENCE,
    backend_obstacle,
    choose,
    device,
    dtype_obstacle,
    platform_obstacle,
)
from pallas_kernels.finite import cleaned, cotangents, guarded
from pallas_kernels.flash import gpu, reference, tpu
from pallas_kernels.flash.blocks import TuningConfig, heuristic
from pallas_kernels.saved import attended
from pallas_kernels.tokens import Tokens
from pallas_kernels.tuned import tuned

KERNELS = {"tpu": tpu, "gpu": gpu}


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_tokens: Tokens,
    k_tokens: Tokens,
    *,
    window: int | None = None,
    implementation: str | None = None,
    tuning: TuningConfig | None = None,
    interpret: Any = False,
    fallback: Callable[[], tuple[jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of q [B, T, N, H] over k, v [B, S, K, H].

    Scores are scaled by 1/sqrt(H), and the softmax is in float32. Query head n reads key/value head
    n // (N / K).

    q_tokens [B, T], k_tokens [B, S]: who sees whom.
    window: see ``tokens.visible``.
    implementation: "tpu", "gpu", "reference", or None for the one that suits the backend and input.
    tuning: block sizes, or None for those of the heuristic.
    interpret: False, or the interpreter's parameters (``pltpu.InterpretParams``,
      ``plgpu.InterpretGPUParams``), which need a named implementation.
    fallback: a function that is called in place of the reference.

    Returns (out [B, T, N, H] in v's dtype, lse [B, T, N] float32, or float64 from a float64
    reference), differentiable in q, k and v through both. A query that sees no key has out 0 and
    lse -inf. Values that are not finite reach only those that see them (``finite``). Raises
    ValueError for shapes that do not fit, and for a named implementation that
    cannot run.
    """
    _check_shapes(q, k, v, q_tokens, k_tokens)
    implementation = choose(
        implementation, [*KERNELS], lambda name: obstacle(name, q, k, v, interpret), interpret
    )
    if implementation == REFERENCE and fallback:
        return fallback()
    if implementation == REFERENCE:
        return reference.attention(q, k, v, q_tokens, k_tokens, window=window)
    q, k, v = guarded(q, k, v, q_tokens.segments > 0, k_tokens.segments > 0)
    tuning = tuning or _sizes(device(implementation), q.shape[2] // k.shape[2], q.shape[3])
    return _attention(
        q, k, v, q_tokens, k_tokens, _Options(implementation, window, tuning, interpret)
    )


@dataclasses.dataclass(frozen=True)
class _Options:
    implementation: str
    window: int | None
    tuning: TuningConfig
    interpret: Any

    def kernel(self, name: str):
        """One of the implementation's kernels with its static arguments."""
        return functools.partial(
            getattr(KERNELS[self.implementation], name),
            window=self.window,
            tuning=self.tuning,
            interpret=self.interpret,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(q, k, v, q_tokens, k_tokens, options: _Options):
    return options.kernel("forward")(q, k, v, q_tokens, k_tokens)


def _forward(q, k, v, q_tokens, k_tokens, options: _Options):
    out, lse = attended(*options.kernel("forward")(q, k, v, q_tokens, k_tokens))
    return (out, lse), (q, k, v, q_tokens, k_tokens, out, lse)


def _backward(options: _Options, residuals, given):
    q, k, v, q_tokens, k_tokens, out, lse = residuals
    d_out, delta, lse = cotangents(out, lse, *given)
    arguments = (cleaned(q), cleaned(k), v, q_tokens, k_tokens, lse, delta, d_out)
    dk, dv = options.kernel("backward_kv")(*arguments)
    return options.kernel("backward_q")(*arguments), dk, dv, None, None


_attention.defvjp(_forward, _backward)


def _sizes(on: str, groups: int, head_dim: int) -> TuningConfig:
    return tuned(heuristic(on, groups, head_dim), "flash", on, groups=groups, head_dim=head_dim)


def check_rows(q, k, v) -> None:
    """Raises ValueError if q [B, T, N, H] cannot attend to k and v [B, S, K, H]."""
    num_heads = q.shape[2]
    num_kv_heads = k.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
    if k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        raise ValueError(
            f"{q.shape=}, {k.shape=} and {v.shape=} must agree in rows and head size, keys with "
            "values"
        )


def _check_shapes(q, k, v, q_tokens: Tokens, k_tokens: Tokens) -> None:
    check_rows(q, k, v)
    if q_tokens.shape != q.shape[:2] or k_tokens.shape != k.shape[:2]:
        raise ValueError(
            f"{q_tokens.shape=} and {k_tokens.shape=} must be the first two of {q.shape=} and "
            f"{k.shape=}"
        )
    if (q_tokens.limits is None) != (k_tokens.limits is None):
        raise ValueError(
            f"{q_tokens.limits=} and {k_tokens.limits=} must both be given or both be None"
        )


def obstacle(name: str, q, k, v, interpret) -> str | None:
    """Reason why a kernel cannot run the input here, or None."""
    found = backend_obstacle(name, (q, k, v), KERNELS[name].DTYPES, interpret)
    return found or KERNELS[name].obstacle(q.shape, k.shape)


def obstacle_on(
    platform: str, name: str, dtype: str, q_shape: tuple[int, ...], k_shape: tuple[int, ...]
) -> str | None:
    """Reason why a kernel could not run q [B, T, N, H] and k [B, S, K, H] on a platform, or
    None.

    platform: as from ``choice.here``.
    """
    return (
        platform_obstacle(name, platform)
        or dtype_obstacle({dtype}, KERNELS[name].DTYPES)
        or KERNELS[name].obstacle(q_shape, k_shape)
    )
