"""The gated delta rule (2412.06464) by chunks, on TPU, GPU or as plain jnp.

The kernels pass from chunk to chunk and keep the state of a head in registers or VMEM; a chunk that
does not continue the one just before reads its state back. The backward pass goes through the
chunks in reverse; what comes back to a state is summed where the chunk is that ended with it. The
work inside of chunks, which knows no state, is the kernel's on TPU, and XLA's on GPU
(``reference.parts``).

Dimensions: B rows, N chunks, C tokens of a chunk, K key heads, R value heads of a key head, H key
size, V value size, W columns of a state, V or more.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.choice import (
    REFERENCE,
    backend_obstacle,
    choose,
    device,
    dtype_obstacle,
    platform_obstacle,
)
from pallas_kernels.delta import gpu, reference, tpu

KERNELS = {"tpu": tpu, "gpu": gpu}


def chunked(
    q: jax.Array,  # [B, N, C, K, H]
    k: jax.Array,  # [B, N, C, K, H]
    v: jax.Array,  # [B, N, C, K, R, V]
    g: jax.Array,  # [B, N, C, K, R]
    beta: jax.Array,  # [B, N, C, K, R]
    first: jax.Array,  # [B, K, R, H, W]
    parents: jax.Array,  # [B, N]
    *,
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule by chunks: (results [B, N, C, K, R, W], the state behind each chunk
    [B, N, K, R, H, W]).

    g: the logarithm of the decay of every token. beta: its rate.
    first: the state 0; it may have more columns than v, whose values are zeros; the results have
      them too.
    parents: the number of the state from which each chunk begins, counting those behind chunks from
      1; it is of a chunk before. Places without a token have zeros in k, g and beta.
    implementation: "tpu", "gpu", "reference", or None for the one that suits the backend and input.
    interpret: False, or the interpreter's parameters (``pltpu.InterpretParams``,
      ``plgpu.InterpretGPUParams``), which need a named implementation.

    Differentiable in all but parents. Products of float32 are as precise as float32. What is not
    finite reaches its own chunk and those that continue it, and back those that it continues.
    Raises ValueError for a named implementation that cannot run.
    """
    implementation = choose(
        implementation,
        [*KERNELS],
        lambda name: _obstacle(name, (q, k, v, g, beta, first), interpret),
        interpret,
    )
    tokens = (q, k, v, g, beta, first.shape[-1])
    if implementation == REFERENCE:
        out, states = reference.passed(first, parents, reference.parts(*tokens))
        states = states[:, 1:]
    else:
        given = KERNELS[implementation].prepared(*tokens)
        out, states = _passed(first, parents, given, _Options(implementation, interpret))
    return out.swapaxes(3, 4).swapaxes(2, 3), states


@dataclasses.dataclass(frozen=True)
class _Options:
    implementation: str
    interpret: Any

    def kernel(self, name: str):
        """One of the implementation's kernels with its static argument."""
        function = getattr(KERNELS[self.implementation], name)
        return functools.partial(function, interpret=self.interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _passed(first, parents, given, options: _Options):
    return options.kernel("forward")(first, parents, given)[:2]


def _forward(first, parents, given, options: _Options):
    first, parents, given = jax.tree.map(lambda x: x.value, (first, parents, given))
    out, states, kept = options.kernel("forward")(first, parents, given)
    return (out, states), (kept, parents, given)


def _backward(options: _Options, residuals, cotangents):
    kept, parents, given = residuals
    d_out, d_states = cotangents
    if isinstance(d_out, SymbolicZero):
        d_out = jax.numpy.zeros(d_out.shape, d_out.dtype)
    # rows that are whole use no states, and zeros for all of them would be read in vain
    if isinstance(d_states, SymbolicZero):
        d_states = None
    d_first, d_given = options.kernel("backward")(kept, parents, given, d_out, d_states)
    return d_first, None, d_given


_passed.defvjp(_forward, _backward, symbolic_zeros=True)


def _obstacle(name: str, arrays, interpret) -> str | None:
    """Reason why a kernel cannot run the input here, or None."""
    q, *_, first = arrays
    found = backend_obstacle(name, arrays, KERNELS[name].DTYPES, interpret)
    return found or KERNELS[name].obstacle(device(name), q.shape[2], first.shape[-2:])


def obstacle_on(
    platform: str, name: str, dtype: str, tokens: int, sizes: tuple[int, int]
) -> str | None:
    """Reason why a kernel could not pass a state of ``sizes`` [H, W] over chunks of ``tokens``
    tokens on a platform, or None.

    platform: as from ``choice.here``.
    """
    return (
        platform_obstacle(name, platform)
        or dtype_obstacle({dtype}, KERNELS[name].DTYPES)
        or KERNELS[name].obstacle(platform, tokens, sizes)
    )
