"""Products with matrices that are cut over the mesh axis ``fsdp``.

The matrix is gathered for the product. In its gradient every device has a sum over its own rows;
these are added over ``fsdp`` by a reduce-scatter, so that a device gets the part that it keeps, and
only these parts are added over the other devices that have rows (hybrid sharding, 2304.11277).

Left to itself, XLA adds a gradient over all devices with rows at once and cuts it then. It makes a
reduce-scatter of that only where the sum and the cut are over the same devices, and on TPU never.
"""

from __future__ import annotations

import functools
import math

import jax

from attention.products import project
from models.sharding import RULES, gathered_array, partition_spec

# The logical axes of rows and their tokens, over which a gradient is added.
_TOKENS = ("batch", "slots")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cut_product(y: jax.Array, matrix: jax.Array, axes: tuple[str, ...], contract: int) -> jax.Array:
    """``project(y, matrix, contract)`` under a mesh that cuts the matrix over ``fsdp``.

    y: [B, T, *inner], with rows and tokens cut as ``batch`` and ``slots``. matrix: [*inner,
    *outer], of the same dtype. axes: its logical axes.
    """
    return project(y, gathered_array(matrix, axes), contract)


def _forward(y, matrix, axes, contract):
    whole = gathered_array(matrix, axes)
    return project(y, whole, contract), (y, whole)


def _backward(axes, contract, kept, gradient):
    y, whole = kept
    (of_y,) = jax.linear_transpose(lambda y: project(y, whole, contract), y)(gradient)
    return of_y, _gradient(y, gradient, axes, contract)


cut_product.defvjp(_forward, _backward)


def _gradient(y: jax.Array, gradient: jax.Array, axes: tuple[str, ...], contract: int) -> jax.Array:
    """The gradient of the matrix, cut as the matrix is."""
    mesh = jax.sharding.get_abstract_mesh()
    cut = [RULES[axis] for axis in axes].index("fsdp")
    others = [name for axis in _TOKENS for name in _names(axis) if name != "fsdp"]
    others = tuple(name for name in others if mesh.shape[name] > 1)

    def of_own_rows(y, gradient):
        inner, outer = y.shape[2:], gradient.shape[2:]
        flat = y.reshape(-1, math.prod(inner)).T @ gradient.reshape(-1, math.prod(outer))
        whole = flat.reshape(*inner, *outer)
        part = jax.lax.psum_scatter(whole, "fsdp", scatter_dimension=cut, tiled=True)
        return jax.lax.psum(part, others) if others else part

    inner, outer = axes[:contract], axes[contract:]
    return jax.shard_map(
        of_own_rows,
        mesh=mesh,
        in_specs=tuple(partition_spec((*_TOKENS, *own), whole=True) for own in (inner, outer)),
        out_specs=partition_spec(axes),
        check_vma=False,
    )(y, gradient)


def _names(axis: str) -> tuple[str, ...]:
    """The mesh axes that a logical axis is cut over."""
    entry = RULES[axis]
    return entry if isinstance(entry, tuple) else (entry,)
