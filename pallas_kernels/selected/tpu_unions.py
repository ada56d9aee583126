"""Attention over chosen blocks on TPU (Mosaic) in the order of queries: a tile of neighbouring
queries goes through the union of the blocks that they chose.

A grid step brings W blocks to one tile. The numbers of the tiles and blocks of all steps are
prefetched into scalar memory, where the index maps read them, so that a block is fetched while the
step before it computes. How many steps there are is known only when the kernel runs: the grid has
as many as the list with the most. A tile keeps its sums in VMEM from its first step to its last.

What a pick costs with the index (``tpu``) against what a block of a union costs here, forward, for
n = 16 blocks of 64 keys, heads of 128 in bfloat16, and tiles of 32 queries:

    query heads of a list (G)                16       4
    index, a pick: bytes moved            20 KB    5 KB    5 moves of its G rows
                   share of a grid step    1/32   1/128
    union, a block: bytes read            32 KB   32 KB
                    operations             17 M     4 M
                    share of a grid step    1/8     1/8

On v5e, v5p and v6e (819, 2,765 and 1,640 GB/s; 197, 459 and 918 TFLOP/s, of which 60 % is assumed;
0.35 us for a grid step) the two take the same time where the union of a tile has 99, 90 and 162
blocks with G = 16, and 55, 40 and 47 with G = 4. It has 16 where all its queries choose alike, and
512 where no two choose a block in common. With 16 blocks the union is 6.2, 5.6 and 10 times as fast
as the index with G = 16, and 3.4, 2.5 and 2.9 times with G = 4. With G below 4 a tile of 32 queries
does not fill the lanes, and the index serves. Nothing was timed. ``unions.plan`` computes the bound
for the shape at hand with the rates of v5p, in whole steps; ``TuningConfig.by_tile`` turns the
unions off.

Scores are transposed: keys lie along sublanes and the tile's rows along lanes, so that what belongs
to a row is one vector of full lanes.

Dimensions: those of ``unions``, with B rows of the batch, K key/value heads.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import Cost
from pallas_kernels.flash.tpu import VMEM_LIMIT, dot, estimate, to_sublanes
from pallas_kernels.selected.unions import Visits
from pallas_kernels.tokens import MASKED


def forward(
    rows: jax.Array,
    order: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_order: jax.Array,
    visits: Visits,
    *,
    queries: int,
    width: int,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the rows of each tile to the blocks that its queries chose.

    rows: [E, L, R G, H]. order: int32 [E, L, R G]. k, v: [B, K, J, size, H]. k_order: int32 [B, J,
    size]. visits: of every list. queries: R. width: W.

    Returns (out [E, L, R G, H] in v's dtype, lse float32 [E, L, R G]); 0 and -inf for a row that
    sees nothing.
    """
    lists, tiles, count, head_dim = rows.shape
    specs = _Specs(lists, k.shape, width)
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, width=width, groups=count // queries),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(lists, jnp.max(visits.used)),
            in_specs=[
                specs.tile(count, head_dim),
                specs.tile(1, count),
                specs.places(),
                *specs.blocks(),
            ],
            out_specs=[specs.tile(count, head_dim), specs.tile(1, count)],
            scratch_shapes=[
                # maximum and sum of the softmax of each row, and its weighted sum of values
                pltpu.VMEM((1, count), jnp.float32),
                pltpu.VMEM((1, count), jnp.float32),
                pltpu.VMEM((head_dim, count), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(rows.shape, v.dtype),
            jax.ShapeDtypeStruct((lists, tiles, 1, count), jnp.float32),
        ],
        compiler_params=_params(),
        interpret=interpret,
        cost_estimate=_estimate(rows, k, visits, width, products=2, moved=2),
        name="selected_union_forward",
    )(*visits, rows, order[:, :, None], _places(k_order, visits, width), *_twice(k, v, width))
    return out, lse[:, :, 0]


def backward_q(
    rows, d_rows, sums, order, k, v, k_order, visits: Visits, *, queries, width, interpret=False
) -> jax.Array:
    """The gradient of every tile's rows [E, L, R G, H], in their dtype.

    d_rows: [E, L, R G, H], the cotangents of the rows. sums: float32 [E, L, 2, R G], lse and delta.
    The rest is as for ``forward``.
    """
    lists, _, count, head_dim = rows.shape
    specs = _Specs(lists, k.shape, width)
    return pl.pallas_call(
        functools.partial(_backward_q_kernel, width=width, groups=count // queries),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(lists, jnp.max(visits.used)),
            in_specs=[
                specs.tile(count, head_dim),
                specs.tile(count, head_dim),
                specs.tile(2, count),
                specs.tile(1, count),
                specs.places(),
                *specs.blocks(),
            ],
            out_specs=specs.tile(count, head_dim),
            scratch_shapes=[pltpu.VMEM((count, head_dim), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        compiler_params=_params(),
        interpret=interpret,
        cost_estimate=_estimate(rows, k, visits, width, products=3, moved=3),
        name="selected_union_backward_q",
    )(
        *visits,
        rows,
        d_rows,
        sums,
        order[:, :, None],
        _places(k_order, visits, width),
        *_twice(k, v, width),
    )


# --- Kernels --------------------------------------------------------------------------------------


def _forward_kernel(tile, block, chosen, used, rows, order, k_order, *refs, width, groups):
    keys, values, (out, lse, top, total, acc) = (
        refs[:width],
        refs[width : 2 * width],
        refs[2 * width :],
    )
    first, last = _ends(tile, used)

    @pl.when(first)
    def _():
        # above MASKED, so that a masked score weighs nothing even before a visible key was met
        top[...] = jnp.full(top.shape, MASKED / 2, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(pl.program_id(1) < used[pl.program_id(0)])
    def _():
        scores = _scores(chosen, rows, order, k_order, _joined(keys), width, groups)
        new_top = jnp.maximum(top[...], jnp.max(scores, axis=0, keepdims=True))
        weights = jnp.exp(scores - new_top)
        # what was summed so far is relative to the old maximum
        shrink = jnp.exp(top[...] - new_top)
        top[...] = new_top
        total[...] = total[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        found = dot(_joined(values), weights.astype(values[0].dtype), ((0,), (0,)))
        acc[...] = acc[...] * shrink + found

    @pl.when(last)
    def _():
        nothing = total[...] == 0
        divisor = jnp.where(nothing, 1.0, total[...])
        out[0, 0] = (acc[...] / divisor).T.astype(out.dtype)
        lse[0, 0] = jnp.where(nothing, -jnp.inf, jnp.log(divisor) + top[...])


def _backward_q_kernel(
    tile, block, chosen, used, rows, d_rows, sums, order, k_order, *refs, width, groups
):
    keys, values, (dq, acc) = refs[:width], refs[width : 2 * width], refs[2 * width :]
    first, last = _ends(tile, used)

    @pl.when(first)
    def _():
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(pl.program_id(1) < used[pl.program_id(0)])
    def _():
        k = _joined(keys)
        lse, delta = (sums[0, 0, i : i + 1] for i in range(2))
        scores = _scores(chosen, rows, order, k_order, k, width, groups)
        weights = jnp.exp(scores - lse)
        d_weights = dot(_joined(values), d_rows[0, 0], ((1,), (1,)))
        d_scores = weights * (d_weights - delta)
        acc[...] += dot(d_scores.astype(k.dtype), k, ((0,), (0,)))

    @pl.when(last)
    def _():
        # the scale of the scores is a factor of the whole sum, and is applied once, at the end
        dq[0, 0] = (acc[...] * rows.shape[-1] ** -0.5).astype(dq.dtype)


def _ends(tile, used):
    """Two truth values: this step is the first one of its tile, and it is the last one."""
    row = pl.program_id(0)
    step = pl.program_id(1)
    end = used[row] - 1
    inside = step <= end
    now, before, after = (
        tile[row, jnp.clip(x, 0, jnp.maximum(end, 0))] for x in (step, step - 1, step + 1)
    )
    return (step == 0) | (inside & (now != before)), inside & ((step == end) | (now != after))


def _scores(chosen, rows, order, k_order, k, width: int, groups: int):
    """Masked and transposed scores [W size, R G] of the rows of a tile and the keys of a step.

    MASKED where the row's query did not choose the block, and where the key's order exceeds the
    row's.
    """
    size = k.shape[0] // width
    scores = dot(k, rows[0, 0], ((1,), (1,))) * rows.shape[-1] ** -0.5
    places = to_sublanes(k_order[0, 0])
    own = order[0, 0]
    query = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, own.shape, 1), jnp.int32(groups))
    first = pl.program_id(1) * width
    masked = []
    for i in range(width):
        part = slice(i * size, (i + 1) * size)
        bits = jnp.full(own.shape, chosen[pl.program_id(0), first + i], jnp.int32)
        # -1 comes before every key, so that a query that did not choose the block sees none
        until = jnp.where(jax.lax.shift_right_logical(bits, query) & 1 == 1, own, -1)
        masked.append(jnp.where(places[part] <= until, scores[part], MASKED))
    return jnp.concatenate(masked, axis=0)


def _joined(blocks):
    """The W blocks of a step, one below the other: [W size, H]."""
    return jnp.concatenate([x[0, 0, 0] for x in blocks], axis=0)


# --- What a grid step holds -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Specs:
    """The blocks of a grid step (list, step).

    Steps past the last one of a list keep its blocks, so that nothing is fetched for them.
    """

    # E.
    lists: int
    # [B, K, J, size, H].
    keys_shape: tuple[int, ...]
    # W.
    width: int

    def tile(self, rows: int, lanes: int) -> pl.BlockSpec:
        """The tile of the step, of [E, L, rows, lanes]."""

        def at(e, s, tile, block, chosen, used):
            return e, tile[e, _step(e, s, used)], 0, 0

        return pl.BlockSpec((1, 1, rows, lanes), at)

    def places(self) -> pl.BlockSpec:
        """The order of the step's keys, of [E, S, 1, W size]."""

        def at(e, s, tile, block, chosen, used):
            return e, _step(e, s, used), 0, 0

        return pl.BlockSpec((1, 1, 1, self.width * self.keys_shape[3]), at)

    def blocks(self) -> list[pl.BlockSpec]:
        """The W blocks of keys of the step, and then those of values."""
        return 2 * [self._block(i) for i in range(self.width)]

    def _block(self, number: int) -> pl.BlockSpec:
        batch, heads, _, *block_shape = self.keys_shape
        each = self.lists // batch

        def at(e, s, tile, block, chosen, used):
            # list ``rest`` of the row's P belongs to its key/value head rest K / P
            row = jax.lax.div(e, jnp.int32(each))
            rest = jax.lax.rem(e, jnp.int32(each))
            head = jax.lax.div(rest * heads, jnp.int32(each))
            return row, head, block[e, _step(e, s, used) * self.width + number], 0, 0

        return pl.BlockSpec((1, 1, 1, *block_shape), at)


def _step(e, s, used):
    return jnp.minimum(s, jnp.maximum(used[e] - 1, 0))


def _places(k_order: jax.Array, visits: Visits, width: int) -> jax.Array:
    """The order of the keys of each step, int32 [E, S, 1, W size].

    They are few beside the keys themselves, and lie along lanes: in a column of the keys' blocks
    each would take a row of 128 lanes.
    """
    lists = visits.block.shape[0]
    order = jnp.repeat(k_order, lists // k_order.shape[0], axis=0)
    found = jax.vmap(lambda order, block: order[block])(order, visits.block)
    return found.reshape(lists, -1, 1, width * k_order.shape[2])


def _twice(k: jax.Array, v: jax.Array, width: int) -> list[jax.Array]:
    """The arguments for ``_Specs.blocks``: one array may be read through several index maps."""
    return width * [k] + width * [v]


def _params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
    )


def _estimate(
    rows: jax.Array, k: jax.Array, visits: Visits, width: int, products: int, moved: int
) -> pl.CostEstimate:
    """The cost if all steps that there is room for are used.

    products: dot products for each row and key. moved: how often the rows' bytes are moved.
    """
    lists, steps = visits.tile.shape
    (size, head_dim) = k.shape[3:]
    pairs = lists * steps * width * size * rows.shape[2]
    keys = 2 * lists * steps * width * size * head_dim * k.dtype.itemsize
    return estimate(Cost(products * 2 * head_dim * pairs, pairs, moved * rows.nbytes + keys))
