"""Memory layout of the GPU kernels over chosen blocks: what they hold, what they copy, and where
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
class KernelSizes:
    """Static arguments of a kernel."""

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
    # Whether the kernel copies the rows of each query itself, and G, query heads of a list.
    gather: bool
    groups: int

    def key(self, row, block):
        """The place where the keys of a block begin in [B K S, H], for the list number ``row`` of
        the E.
        """
        per_row = self.lists // self.batch
        # List i of a row's P belongs to its key/value head i K / P. ``div`` and ``rem`` truncate,
        # which is enough for numbers that are not negative and costs less than // and %.
        head = jax.lax.div(jax.lax.rem(row, jnp.int32(per_row)) * self.heads, jnp.int32(per_row))
        head += jax.lax.div(row, jnp.int32(per_row)) * self.heads
        return (head * self.blocks + block) * self.size

    def order(self, row, block):
        """The place where the order of a block's keys begins in [B, S]: (row of the batch, first
        place).
        """
        return jax.lax.div(row, jnp.int32(self.lists // self.batch)), block * self.size


# --- What is copied -------------------------------------------------------------------------------


def tile_at(tile, plan: KernelSizes):
    """The index in [E L, ...] of a tile of this thread block's list."""
    return jax.lax.axis_index("row") * plan.tiles + tile


def row_copies(query, arrays, rings, own: int, unit, plan: KernelSizes):
    """(a function from a turn to what is copied of its rows, where each copy goes).

    A turn is what all warpgroups take of a tile at the same time, ``own`` rows each; turns count on
    through the tiles of the thread block's list. query, arrays: from ``row_arrays``, in the order
    of ``rings``: queries, their cotangents (perhaps), lse and delta (with these), order.
    """
    turns = ROWS // (own * unit.compute)
    large = len(arrays) // 2  # the arrays with rows of a head size
    row = jax.lax.axis_index("row")

    def side_by_side(turn):
        at = row * (plan.tiles * turns) + turn
        rows = [
            x.at[pl.ds((at * unit.compute + i) * own, own)]
            for x in arrays[:large]
            for i in range(unit.compute)
        ]
        return (*rows, *(x.at[at] for x in arrays[large:]))

    if not plan.gather:
        slots = [ring.at[i] for ring in rings[:large] for i in range(unit.compute)]
        return side_by_side, (*slots, *rings[large:])

    *queries, order = arrays
    each = own // plan.groups  # queries of a warpgroup
    batch = jax.lax.div(row, jnp.int32(plan.lists // plan.batch))

    def one_by_one(turn):
        tile = jax.lax.div(turn, jnp.int32(turns))
        first = jax.lax.rem(turn, jnp.int32(turns)) * (unit.compute * each)
        # all numbers are read before the first copy starts, so that they arrive together
        numbers = [query[row, tile, first + i] for i in range(unit.compute * each)]
        return [
            source
            for at in numbers
            for source in (
                *(x.at[row, at] for x in queries[:large]),
                *(x.at[row, at, i] for x in queries[large:] for i in range(2)),
                order.at[batch, at],
            )
        ]

    *targets, order_ring = rings
    slots = []
    for wg in range(unit.compute):
        for i in range(each):
            mine = pl.ds(i * plan.groups, plan.groups)
            slots += [ring.at[wg].at[:, mine] for ring in targets[:large]]
            slots += [ring.at[:, sum_, wg, mine] for ring in targets[large:] for sum_ in range(2)]
            slots.append(order_ring.at[:, wg, mine])
    return one_by_one, slots


def row_copy_count(arrays: int, own: int, unit, plan: KernelSizes) -> int:
    """The number of copies that ``row_copies`` makes in a turn, of 2 or 4 arrays."""
    if not plan.gather:
        return arrays // 2 * unit.compute + arrays - arrays // 2
    return unit.compute * (own // plan.groups) * (2 if arrays == 2 else 5)


def key_sources(block, tile, part, k, v, k_order, plan: KernelSizes):
    """The copies of a part of the tile's block: keys, values and their order."""
    row = jax.lax.axis_index("row")
    at = block[row, tile]
    batch, place = plan.order(row, at)
    own = pl.ds(plan.key(row, at) + part * PART, PART)
    return k.at[own], v.at[own], k_order.at[batch, pl.ds(place + part * PART, PART)]


def row_rings(plan: KernelSizes, own: int, dtype) -> list:
    """Types of the rings of rows, of their gradients, of lse and delta, and of orders.

    own: rows of each warpgroup.
    """
    unit = UNITS[plan.unit]
    rows = tiles((unit.compute, plan.steps, own, plan.lanes), dtype)
    sums = plgpu.SMEM((plan.steps, 2, unit.compute, own), jnp.float32)
    return [rows, rows, sums, plgpu.SMEM((plan.steps, unit.compute, own), jnp.int32)]


def key_rings(plan: KernelSizes, dtype) -> list:
    """Types of the rings of keys, of values and of orders, a part of a block in each slot."""
    keys = tiles((plan.steps, PART, plan.lanes), dtype)
    return [keys, keys, plgpu.SMEM((plan.steps, PART), jnp.int32)]


def load(ref, unit, reduced: int):
    """A vector in registers, in the layout of scores along the axis that is not ``reduced``."""
    return plgpu.load(ref, layout=unit.layout.reduce(reduced), optimized=False)


# --- How arrays lie in memory ---------------------------------------------------------------------


def make_plan(
    rows: jax.Array, k: jax.Array, query: jax.Array | None, tuning: TuningConfig, interpret
) -> KernelSizes:
    """query: None where ``rows`` are those of tiles, else the queries of the tiles' places."""
    batch, heads, blocks, size, head_dim = k.shape
    gather = query is not None
    return KernelSizes(
        lists=rows.shape[0],
        tiles=(query if gather else rows).shape[1],
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
        gather=gather,
        groups=rows.shape[2] if gather else 0,
    )


def row_arrays(query, arrays, own: int, unit, plan: KernelSizes) -> list[jax.Array]:
    """The arguments of a kernel that come from rows: the queries in the places of tiles, and the
    arrays.

    arrays: queries, their cotangents (perhaps), lse and delta (with these) and order: in tiles, or
    in the order of queries where the kernel gathers. Then each gets one query more, which sees
    nothing: that of the empty places.
    """
    large = len(arrays) // 2
    *queries, order = arrays
    if not plan.gather:
        rows = (flat(x) for x in arrays[:large])
        unused = jnp.zeros((1, 1, 1), jnp.int32)
        return [unused, *rows, *(by_warpgroup(x, unit, own) for x in arrays[large:])]
    rows = [pad(x, SWIZZLE // x.dtype.itemsize, axis=3) for x in queries[:large]]
    queries = [
        jnp.pad(x, ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2)) for x in rows + queries[large:]
    ]
    order = jnp.pad(order, ((0, 0), (0, 1)), constant_values=-1)
    order = jnp.broadcast_to(order[..., None], (*order.shape, plan.groups))
    return [jnp.minimum(query, arrays[0].shape[1]), *queries, order]


def launch(plan: KernelSizes, blocks: int, interpret) -> dict:
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


def tile_shape(rows: jax.Array, plan: KernelSizes) -> tuple[int, int, int, int]:
    """[E, L, R G, H] of the tiles' results."""
    width = ROWS if plan.gather else rows.shape[2]
    return plan.lists, plan.tiles, width, rows.shape[3]


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
