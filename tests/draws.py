"""Random numbers by few programs: those that jax draws, as numpy arrays of any shape."""

from __future__ import annotations

import contextlib
import functools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

# before anything is replaced
_TRUNCATED_NORMAL = jax.random.truncated_normal


def normal(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> np.ndarray:
    """``jax.random.normal``."""
    return _first(_normal(key, _size(shape), jnp.dtype(dtype)), shape)


def truncated_normal(
    key: jax.Array, lower: float, upper: float, shape: tuple[int, ...], dtype=jnp.float32
) -> np.ndarray:
    """``jax.random.truncated_normal``."""
    return _first(_truncated(key, lower, upper, _size(shape), jnp.dtype(dtype)), shape)


def _size(shape: tuple[int, ...]) -> int:
    """In few sizes, since each is compiled. A number depends on its place alone."""
    return max(4096, 1 << (math.prod(shape) - 1).bit_length())


def _first(drawn: jax.Array, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(drawn)[: math.prod(shape)].reshape(shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, size: int, dtype) -> jax.Array:
    return jax.random.normal(key, (size,), dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _truncated(key, lower: float, upper: float, size: int, dtype) -> jax.Array:
    return _TRUNCATED_NORMAL(key, lower, upper, (size,), dtype)


def fewer_programs() -> contextlib.AbstractContextManager:
    """Models that are made within it have the parameters that they would have without."""
    return mock.patch.object(jax.random, "truncated_normal", truncated_normal)
