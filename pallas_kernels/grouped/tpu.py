"""Grouped products on TPU: JAX's own kernels (megablox).

A block of rows at the border of two groups is multiplied with the matrices of both, and each group
writes its own rows. The grid is as long as the blocks that there are.

Dimensions: P rows, E groups, D and F sizes of a matrix.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from pallas_kernels.grouped.blocks import TuningConfig
from pallas_kernels.padding import pad

DTYPES = ("bfloat16", "float32")
# Lanes of a vector register: a block's last axis is a multiple of it, or the whole axis.
_LANES = 128
# Bytes of VMEM that blocks may take, two of each in flight; a core of v5e has 16 MiB for them.
_VMEM = 12 * 2**20


def product(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool,
    tuning: TuningConfig,
    interpret: Any = False,
) -> jax.Array:
    """As ``reference.product``."""
    columns = w.shape[1 if transposed else 2]
    with jax.named_scope("grouped_product"):
        out = gmm(
            pad(x, tuning.rows, axis=0),
            w,
            sizes,
            preferred_element_type=x.dtype,
            tiling=_product_blocks(tuning, x.shape[1], columns, x.dtype.itemsize),
            transpose_rhs=transposed,
            interpret=interpret,
        )
    # nothing is written behind the last group's rows
    real = jnp.arange(len(x)) < jnp.sum(sizes)
    return jnp.where(real[:, None], out[: len(x)], 0)


def outer_product(
    x: jax.Array, y: jax.Array, sizes: jax.Array, *, tuning: TuningConfig, interpret: Any = False
) -> jax.Array:
    """As ``reference.outer_product``."""
    x, y = (pad(z, tuning.rows, axis=0) for z in (x, y))
    with jax.named_scope("grouped_outer_product"):
        return tgmm(
            x.swapaxes(0, 1),
            y,
            sizes,
            preferred_element_type=x.dtype,
            tiling=_outer_blocks(tuning, x.shape[1], y.shape[1], x.dtype.itemsize),
            interpret=interpret,
        )


def _product_blocks(
    tuning: TuningConfig, contracted: int, columns: int, itemsize: int
) -> tuple[int, int, int]:
    """Blocks (of rows, of the contracted axis, of columns) that fit into VMEM together.

    The contracted axis is cut last: as long as it is whole, a block of a group's matrix stays in
    VMEM for all rows of the group.
    """
    rows = tuning.rows
    contracted, columns = _whole(contracted, tuning.contracted), _whole(columns, tuning.columns)
    while (
        2 * itemsize * (rows + columns) * contracted + (2 * itemsize + 4) * rows * columns > _VMEM
        and max(contracted, columns) > _LANES
    ):
        if columns > 2 * _LANES or contracted <= _LANES:
            columns = _whole(columns, columns // 2)
        else:
            contracted = _whole(contracted, contracted // 2)
    return rows, contracted, columns


def _outer_blocks(
    tuning: TuningConfig, size: int, columns: int, itemsize: int
) -> tuple[int, int, int]:
    """The same for the outer product (of rows, of the result's rows, of its columns)."""
    rows = tuning.rows
    size, columns = _whole(size, tuning.contracted), _whole(columns, tuning.columns)
    while (
        2 * itemsize * rows * (size + columns) + (2 * itemsize + 4) * size * columns > _VMEM
        and max(size, columns) > _LANES
    ):
        if size >= columns:
            size = _whole(size, size // 2)
        else:
            columns = _whole(columns, columns // 2)
    return rows, size, columns


def _whole(size: int, most: int) -> int:
    """The whole axis, or at most so many whole lanes of it."""
    return size if size <= most else max(_LANES, most // _LANES * _LANES)
