"""The memory of the GPU kernels: tiles of arrays in the order in which they are used, and what a
thread block has in shared memory.

Dimensions: those of ``delta.gpu``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta.reference import Parts
from pallas_kernels.matrix_units import tiles
from pallas_kernels.padding import pad
from pallas_kernels.pipeline import barriers

# Rows and columns of a tile, which a warpgroup multiplies.
TILE = 64
# Slots of the ring of tiles, 24 KiB each: what the states of the largest key size leave of shared
# memory.
STEPS = 6
# Parts of a float32 number.
PARTS = 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static arguments of a kernel."""

    chunks: int
    heads: int
    # P.
    columns: int
    # H / 64.
    keys: int
    interpret: bool

    @property
    def tiles(self) -> int:
        """Tiles that a thread block goes through with every chunk."""
        return 2 + 3 * self.keys

    @property
    def size(self) -> int:
        """H."""
        return self.keys * TILE


def planned(values: jax.Array, corrections: jax.Array, interpret: Any) -> Plan:
    """The plan of a kernel; values and corrections as from ``by_head``."""
    chunks, heads = values.shape[2], values.shape[1]
    columns, keys = (x.shape[-1] // TILE for x in (values, corrections))
    return Plan(chunks, heads, columns, keys, bool(interpret))


def ring(plan: Plan) -> list:
    """Types of the ring of tiles and of its barriers."""
    ring = tiles((STEPS, PARTS * TILE, TILE), jnp.bfloat16)
    return [ring, *barriers(STEPS, compute=1, arrays=1)]


def launch(plan: Plan, batch: int) -> dict:
    """Options of both kernels."""
    return {
        "grid": (plan.columns, plan.heads, batch),
        "grid_names": ("part", "head", "row"),
        "num_threads": 2,
        "thread_name": "wg",
        "compiler_params": plgpu.CompilerParams(),
    }


def by_head(parts: Parts) -> list[jax.Array]:
    """The parts [B, M, N, ...], filled up to whole tiles, and the decays [B, M, N] of chunks."""
    *given, end = (x.reshape(*x.shape[:2], -1, *x.shape[4:]).swapaxes(1, 2) for x in parts)
    return [*map(filled, given), jnp.exp(end[..., 0])]


def filled(x: jax.Array) -> jax.Array:
    """x with its last two axes filled up to whole tiles by zeros."""
    return pad(pad(x, TILE, axis=x.ndim - 2), TILE, axis=x.ndim - 1)


def across(x: jax.Array) -> list[jax.Array]:
    """The tiles of x [..., 64, columns] from left to right."""
    return jnp.split(x, x.shape[-1] // TILE, axis=-1)


def in_turn(*arrays: jax.Array) -> list[jax.Array]:
    """The tiles of arrays, first the leftmost of each."""
    return [tile for place in zip(*map(across, arrays), strict=True) for tile in place]


def in_order(own: jax.Array, right: Sequence[jax.Array]) -> jax.Array:
    """All tiles of all chunks, as parts in bfloat16, in the order in which they are used.

    own: [B, M, N, 64, W], of which every thread block has a tile, transposed. right: tiles
    [B, M, N, 64, 64] that all of them multiply by. Returns an array [tiles * 3 * 64, 64].
    """
    found = jnp.stack([*(tile.swapaxes(-1, -2) for tile in across(own)), *right], axis=3)
    parts = []
    for _ in range(PARTS):
        # a conversion there and back is none to XLA
        part = jax.lax.reduce_precision(found, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        found = found - part
    return jnp.stack(parts, axis=4).reshape(-1, TILE)


def from_tiles(out: jax.Array, plan: Plan, shape: tuple[int, ...]) -> jax.Array:
    """Results [B * M * N * W, 64], transposed and filled up, in ``shape`` [B, N, K, R, C, W]."""
    out = out.reshape(shape[0], plan.heads, plan.chunks, -1, TILE)
    return out[..., : shape[5], : shape[4]].transpose(0, 2, 1, 4, 3).reshape(shape)
