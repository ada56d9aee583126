"""The definition of the grouped products: XLA's ragged products.

Dimensions: P rows, E groups, D and F sizes of a matrix.
"""

from __future__ import annotations

import jax
from jax.lax import RaggedDotDimensionNumbers

# Rows of a group are contracted, and every group has a result of its own.
_OUTER = RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def product(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """x [P, D] with each group's w [E, D, F], or w [E, F, D] transposed: [P, F] in x's dtype.

    sizes: int32 [E], rows of each group from row 0 on. The result of rows behind the last group's
    is 0.
    """
    return jax.lax.ragged_dot(x, w.swapaxes(1, 2) if transposed else w, sizes)


def outer_product(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """For each group, its rows of x [P, D] transposed times those of y [P, F]: [E, D, F]."""
    return jax.lax.ragged_dot_general(x, y, sizes, _OUTER)
