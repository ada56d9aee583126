"""Attention over chosen blocks of keys with a differentiable log-sum-exp, on TPU, GPU or as plain
jnp.

It serves the selected branch of native sparse attention (2502.11089) and the attention of MoBA
(2502.13189). The work goes in the order of blocks, not of queries: an inverse index (``tiles``)
finds the queries that chose a block, forward and backward. Groups of any size then fill the matrix
products, and the gradient of a key never looks at a query that did not choose it.

Dimensions: B rows, T queries, S places of keys, N query heads, K key/value heads, P lists per query
(K or N), H head size, n picks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import (
    REFERENCE,
    backend_obstacle,
    choose,
    device,
    dtype_obstacle,
    platform_obstacle,
)
from pallas_kernels.finite import cleaned, guarded
from pallas_kernels.flash.api import check_rows
from pallas_kernels.saved import attended
from pallas_kernels.selected import chunks, gpu, reference, tpu
from pallas_kernels.selected.tuning import TuningConfig, heuristic
from pallas_kernels.tuned import tuned

KERNELS = {"tpu": tpu, "gpu": gpu}
# The order of an empty place, past all others.
EMPTY = jnp.iinfo(jnp.int32).max


def selected_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    picks: jax.Array,
    q_order: jax.Array,
    k_order: jax.Array,
    *,
    size: int,
    implementation: str | None = None,
    tuning: TuningConfig | None = None,
    interpret: Any = False,
    fallback: Callable[[], tuple[jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of q [B, T, N, H] over the chosen blocks of k, v [B, S, K, H].

    Scores are scaled by 1/sqrt(H). A query sees a place of a block it chose when the place's order
    is at most its own.

    picks: int32 [B, T, P, n], numbers of blocks of ``size`` places, each at most once, -1 for none.
      P is K where the heads of a group share a list, and N where every head has its own.
    q_order: int32 [B, T], not negative.
    k_order: int32 [B, S], EMPTY for an empty place.
    implementation: "tpu", "gpu", "reference", or None for the one that suits the backend and input.
    tuning: sizes, or None for those of the heuristic.
    interpret: False, or the interpreter's parameters (``pltpu.InterpretParams``,
      ``plgpu.InterpretGPUParams``), which need a named implementation.
    fallback: a function that is called in place of the reference.

    Returns (out [B, T, N, H] in v's dtype, lse [B, T, N] float32, or float64 from a float64
    reference), differentiable in q, k and v through both. A query that sees no key has out 0 and
    lse -inf. Raises ValueError for shapes that do not fit, and for a named implementation that
    cannot run.
    """
    _check_shapes(q, k, v, picks, q_order, k_order, size)
    sizes = {
        name: tuning or _sizes(device(name), q.shape, picks.shape[2], size) for name in KERNELS
    }

    def obstacle(name: str) -> str | None:
        found = backend_obstacle(name, (q, k, v), KERNELS[name].DTYPES, interpret)
        return found or _shape_obstacle(
            name, sizes[name], q.shape, picks.shape, size, k.shape[1] // size
        )

    implementation = choose(implementation, [*KERNELS], obstacle, interpret)
    if implementation == REFERENCE and fallback:
        return fallback()
    if implementation == REFERENCE:
        return reference.attention(q, k, v, picks, q_order, k_order, size=size)
    q, k, v = guarded(q, k, v, None, k_order < EMPTY)
    options = _Options(implementation, size, sizes[implementation], interpret)
    return _attention(q, k, v, picks, q_order, k_order, options)


@dataclasses.dataclass(frozen=True)
class _Options:
    implementation: str
    size: int
    tuning: TuningConfig
    interpret: Any

    def run(self, function, *arguments):
        """A pass with its static arguments."""
        kernels = KERNELS[self.implementation]
        return function(
            *arguments,
            size=self.size,
            kernels=kernels,
            tuning=self.tuning,
            interpret=self.interpret,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(q, k, v, picks, q_order, k_order, options: _Options):
    return options.run(chunks.forward, q, k, v, picks, q_order, k_order)


def _forward(q, k, v, picks, q_order, k_order, options: _Options):
    out, lse = attended(*options.run(chunks.forward, q, k, v, picks, q_order, k_order))
    return (out, lse), (q, k, v, picks, q_order, k_order, out, lse)


def _backward(options: _Options, residuals, cotangents):
    q, k, *rest = residuals
    arguments = (cleaned(q), cleaned(k), *rest, *cotangents)
    return (*options.run(chunks.backward, *arguments), None, None, None)


_attention.defvjp(_forward, _backward)


def _check_shapes(q, k, v, picks, q_order, k_order, size: int) -> None:
    check_rows(q, k, v)
    lists = k.shape[2], q.shape[2]
    if picks.shape[:2] != q.shape[:2] or picks.shape[2] not in lists:
        raise ValueError(
            f"{picks.shape=} must begin with {q.shape[:2]} and {lists[0]} or {lists[1]} lists"
        )
    if q_order.shape != q.shape[:2] or k_order.shape != k.shape[:2]:
        raise ValueError(
            f"{q_order.shape=} and {k_order.shape=} must be the first two of {q.shape=} and "
            f"{k.shape=}"
        )
    if size < 1 or k.shape[1] % size:
        raise ValueError(f"{size=} must divide the {k.shape[1]} places of keys")


def obstacle_on(
    platform: str,
    name: str,
    dtype: str,
    q_shape: tuple[int, ...],
    picks_shape: tuple[int, ...],
    size: int,
    blocks: int,
) -> str | None:
    """Reason why a kernel could not run on a platform, or None.

    platform: as from ``choice.here``. The shapes are those of q [B, T, N, H] and of picks [B, T, P,
    n]; there are ``blocks`` blocks of ``size`` places.
    """
    found = platform_obstacle(name, platform) or dtype_obstacle({dtype}, KERNELS[name].DTYPES)
    if found:
        return found
    sizes = _sizes(platform, q_shape, picks_shape[2], size)
    return _shape_obstacle(name, sizes, q_shape, picks_shape, size, blocks)


def _sizes(on: str, q_shape: tuple[int, ...], lists: int, size: int) -> TuningConfig:
    shape = dict(groups=q_shape[2] // lists, head_dim=q_shape[3], size=size)
    return tuned(heuristic(on), "selected", on, **shape)


def _shape_obstacle(
    name: str,
    sizes: TuningConfig,
    q_shape: tuple[int, ...],
    picks_shape: tuple[int, ...],
    size: int,
    blocks: int,
) -> str | None:
    count = chunks.most_tiles(q_shape, picks_shape, blocks, KERNELS[name], sizes)
    return KERNELS[name].obstacle(q_shape, picks_shape[2], size, count)
