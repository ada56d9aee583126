"""How the GPU kernels over chosen blocks lay out memory: what they hold, what they copy, and where
the copies come from.

Dimensions: those of ``gpu``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matrix_units import SWIZZLE, UNITS, tiles
from pallas_kernels.padding import pad
from pallas_kernels.selected.tuning import TuningConfig

# ROWS: rows of a tile. PART: keys of a block that a tile meets at a time. SHARE: rows of a tile
# that one warpgroup takes at a time in the kernel that holds keys.
ROWS, PART, SHARE = 128, 64, 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static in a kernel."""

    # E, L, B, K and J.
    lists: int
    tiles: int
    batch: int
    heads: int
    blocks: int
    # Keys of a block.
    size: int
    # The head size with its padding.
    lanes: int
    # Keys that a thread block holds in the kernel that computes their gradients.
    held: int
    # Consecutive tiles that a thread block goes through in the other kernels.
    span: int
    # Slots of the ring: copies that are in flight at the same time.
    steps: int
    # 1 / sqrt(H), of the head size before padding.
    scale: float
    interpret: bool
    # A key of ``matrix_units.UNITS``.
    unit: str

    def key(self, row, block):
        """Where the keys of a block begin in [B K S, H], for the list number ``row`` of the E."""
        per_row = self.lists // self.batch
        # List i of a row's P belongs to its key/value head i K / P. ``div`` and ``rem`` truncate,
        # which is enough for numbers that are not negative and costs less than // and %.
        head = jax.lax.div(jax.lax.rem(row, jnp.int32(per_row)) * self.heads, jnp.int32(per_row))
        head += jax.lax.div(row, jnp.int32(per_row)) * self.heads
        return (head * self.blocks + block) * self.size

    def order(self, row, block):
        """Where the order of a block's keys begins in [B, S]: (row of the batch, first place)."""
        return jax.lax.div(row, jnp.int32(self.lists // self.batch)), block * self.size


# --- What is copied -------------------------------------------------------------------------------


def tile_at(tile, plan: Plan):
    """The index in [E L, ...] of a tile of this thread block's list."""
    return jax.lax.axis_index("row") * plan.tiles + tile


def own_rows(rows, at, own: int, unit):
    """The rows that the warpgroups multiply in turn ``at``: ``own`` consecutive ones for each."""
    return [rows.at[pl.ds((at * unit.compute + i) * own, own)] for i in range(unit.compute)]


def row_sources(rows, d_rows, sums, order, at, own: int, unit):
    """What is copied of the rows of turn ``at``: the rows, their gradients, lse and delta, order.

    In the order of ``row_slots`` and the two rings after them.
    """
    return (
        *own_rows(rows, at, own, unit),
        *own_rows(d_rows, at, own, unit),
        sums.at[at],
        order.at[at],
    )


def row_slots(row_ring, d_ring, unit):
    """The rings of rows and of their gradients, one of each for every warpgroup."""
    return [ring.at[i] for ring in (row_ring, d_ring) for i in range(unit.compute)]


def key_sources(block, tile, part, k, v, k_order, plan: Plan):
    """What is copied of a part of the tile's block: keys, values and their order."""
    row = jax.lax.axis_index("row")
    at = block[row, tile]
    batch, place = plan.order(row, at)
    own = pl.ds(plan.key(row, at) + part * PART, PART)
    return k.at[own], v.at[own], k_order.at[batch, pl.ds(place + part * PART, PART)]


def row_rings(plan: Plan, own: int, dtype) -> list:
    """Types of the rings of rows, of their gradients, of lse and delta, and of orders.

    own: rows of each warpgroup.
    """
    unit = UNITS[plan.unit]
    rows = tiles((unit.compute, plan.steps, own, plan.lanes), dtype)
    sums = plgpu.SMEM((plan.steps, 2, unit.compute, own), jnp.float32)
    return [rows, rows, sums, plgpu.SMEM((plan.steps, unit.compute, own), jnp.int32)]


def key_rings(plan: Plan, dtype) -> list:
    """Types of the rings of keys, of values and of orders, a part of a block in each slot."""
    keys = tiles((plan.steps, PART, plan.lanes), dtype)
    return [keys, keys, plgpu.SMEM((plan.steps, PART), jnp.int32)]


def load(ref, unit, reduced: int):
    """A vector in registers, in the layout of scores along the axis that is not ``reduced``."""
    return plgpu.load(ref, layout=unit.layout.reduce(reduced), optimized=False)


# --- How arrays lie in memory ---------------------------------------------------------------------


def make_plan(rows: jax.Array, k: jax.Array, tuning: TuningConfig, interpret) -> Plan:
    batch, heads, blocks, size, head_dim = k.shape
    return Plan(
        lists=rows.shape[0],
        tiles=rows.shape[1],
        batch=batch,
        heads=heads,
        blocks=blocks,
        size=size,
        lanes=head_dim + -head_dim % (SWIZZLE // k.dtype.itemsize),
        held=PART if size % UNITS[tuning.matrix_unit].tile else UNITS[tuning.matrix_unit].tile,
        span=tuning.span,
        steps=tuning.steps,
        scale=head_dim**-0.5,
        interpret=bool(interpret),
        unit=tuning.matrix_unit,
    )


def launch(plan: Plan, blocks: int, interpret) -> dict:
    return {
        "grid": (blocks, plan.lists),
        "grid_names": ("block", "row"),
        "num_threads": UNITS[plan.unit].compute + 1,
        "thread_name": "wg",
        "compiler_params": plgpu.CompilerParams(approx_math=True),
        "interpret": interpret or None,
    }


def flat(x: jax.Array) -> jax.Array:
    """[E, L, R G, H] -> [E L ROWS, lanes], filled up with zeros."""
    x = pad(pad(x, ROWS, axis=2), SWIZZLE // x.dtype.itemsize, axis=3)
    return x.reshape(-1, x.shape[3])


def tiled(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of ``flat``, for the shape given."""
    return x.reshape(*shape[:2], ROWS, -1)[:, :, : shape[2], : shape[3]]


def by_warpgroup(x: jax.Array, unit, own: int) -> jax.Array:
    """[E, L, ..., R G] -> [E L turns, ..., warpgroups, own].

    A turn is what all warpgroups take of a tile at the same time, ``own`` rows each.
    """
    x = pad(x, ROWS, axis=x.ndim - 1)
    x = x.reshape(-1, *x.shape[2:-1], ROWS // (own * unit.compute), unit.compute, own)
    return jnp.moveaxis(x, -3, 1).reshape(-1, *x.shape[1:-3], unit.compute, own)


def flat_keys(k: jax.Array, v: jax.Array, k_order: jax.Array) -> list[jax.Array]:
    """Keys and values as [B K S, lanes], and their order as [B, S]."""
    k, v = (pad(x, SWIZZLE // x.dtype.itemsize, axis=4) for x in (k, v))
    return [
        k.reshape(-1, k.shape[4]),
        v.reshape(-1, v.shape[4]),
        k_order.reshape(k_order.shape[0], -1),
    ]
