"""Attention over chosen blocks on TPU (Mosaic): a grid step is one tile of queries and the block
that they chose.

The numbers of the tiles' blocks are prefetched into scalar memory, where the index maps read them.
Keys are therefore fetched ahead, and only when the block changes. The tiles of a block follow each
other. The gradients of the block's keys stay in VMEM from its first tile to its last, and are added
in place to those of the turns before. Blocks that nobody chose are not touched.

Scores are transposed: keys lie along sublanes and queries along lanes. The queries of a tile fill
the lanes whatever the size of a block is.

XLA gathers the rows of queries. The kernel could copy each row itself, which would save writing the
rows and reading them once. But it would have to start one copy of a few hundred bytes for each
query of a tile, which takes longer than the tile's products.

Dimensions: E lists of all rows, L tiles, R G rows of a tile, J blocks, H head size.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import Cost
from pallas_kernels.flash.tpu import VMEM_LIMIT
from pallas_kernels.selected.tuning import TuningConfig
from pallas_kernels.tokens import MASKED

DTYPES = ("float32", "bfloat16")
# The devices that the kernels are written for.
TARGETS = ("v5e", "v5p", "v6e")
ELSEWHERE = "no kernel for this TPU"
# None: ``backward_kv`` adds to the gradients of keys and values in place.
SPANS = None
# Numbers of tiles' blocks that fit the scalar memory beside what the compiler keeps there.
MAX_TILES = 2**17
LANES = 128


def obstacle(q_shape: tuple[int, ...], lists: int, size: int, tiles: int) -> str | None:
    """Reason why the kernels cannot run q [B, T, N, H] with these numbers of lists and tiles
    and this size of blocks, or None.
    """
    if size % 8 or size > 512:
        return f"{size=} must be a multiple of 8 up to 512"
    return None if tiles <= MAX_TILES else f"{tiles} tiles at a time are more than {MAX_TILES}"


def tile_rows(tuning: TuningConfig, mean: int) -> int:
    """Rows of a tile: whole lanes, but no more than will be in use.

    mean: how many rows choose a block on average.
    """
    return max(LANES, min(tuning.rows, mean) // LANES * LANES)


def gathers(queries: int, groups: int, tuning: TuningConfig) -> bool:
    """False: XLA gathers the rows of tiles. See above."""
    return False


def forward(
    rows: jax.Array,
    order: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_order: jax.Array,
    block: jax.Array,
    starts: jax.Array,
    *,
    tuning: TuningConfig,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the rows of each tile to the block of the tile.

    rows: [E, L, R G, H]. order: int32 [E, L, R G]. k, v: [B, K, J, size, H]. k_order: int32 [B, J,
    size]. block: int32 [E, L], and starts: int32 [E, J + 1], as in ``Tiles``.

    Returns (out [E, L, R G, H] in v's dtype, lse float32 [E, L, R G]). The lse of a row that sees
    nothing is about MASKED. Tiles from starts[J] on are not written.
    """
    lists, tiles, width, head_dim = rows.shape
    specs = _Specs(lists, k.shape)
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, scale=head_dim**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(lists, tiles),
            in_specs=[specs.tile(width, head_dim), specs.tile(1, width), *specs.keys()],
            out_specs=[specs.tile(width, head_dim), specs.tile(1, width)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(rows.shape, v.dtype),
            jax.ShapeDtypeStruct((lists, tiles, 1, width), jnp.float32),
        ],
        compiler_params=_params(),
        interpret=interpret,
        cost_estimate=_estimate(rows, k, products=2, moved=2),
        name="selected_forward",
    )(block, starts[:, -1], rows, order[:, :, None], k, v, k_order[..., None])
    return out, lse[:, :, 0]


def backward_q(
    rows,
    d_rows,
    sums,
    order,
    k,
    v,
    k_order,
    block,
    starts,
    *,
    tuning: TuningConfig,
    interpret=False,
) -> jax.Array:
    """The gradient of every tile's rows, float32 [E, L, R G, H].

    d_rows [E, L, R G, H], the cotangents of the rows; sums float32 [E, L, 2, R G], lse and delta;
    the rest as for ``forward``.
    """
    lists, tiles, width, head_dim = rows.shape
    specs = _Specs(lists, k.shape)
    return pl.pallas_call(
        functools.partial(_backward_q_kernel, scale=head_dim**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(lists, tiles),
            in_specs=[*specs.rows(width, head_dim), *specs.keys()],
            out_specs=specs.tile(width, head_dim),
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
        compiler_params=_params(),
        interpret=interpret,
        cost_estimate=_estimate(rows, k, products=3, moved=4),
        name="selected_backward_q",
    )(block, starts[:, -1], rows, d_rows, sums, order[:, :, None], k, v, k_order[..., None])


def backward_kv(
    rows,
    d_rows,
    sums,
    order,
    k,
    v,
    k_order,
    block,
    used,
    d_keys,
    *,
    tuning: TuningConfig,
    interpret=False,
) -> list[jax.Array]:
    """d_keys with what these tiles add.

    used: int32 [E], how many of a list's tiles are in use. d_keys: two float32 [E, J, size, H], of
    keys and of values. The rest is as for ``backward_q``.
    """
    lists, tiles, width, head_dim = rows.shape
    specs = _Specs(lists, k.shape)
    return pl.pallas_call(
        functools.partial(_backward_kv_kernel, scale=head_dim**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(lists, tiles),
            in_specs=[*specs.rows(width, head_dim), *specs.keys(), specs.sums(), specs.sums()],
            out_specs=[specs.sums(), specs.sums()],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in d_keys],
        # The two d_keys are arguments 9 and 10, counting the two prefetched ones: a block that no
        # tile visits keeps its sums without being copied.
        input_output_aliases={9: 0, 10: 1},
        compiler_params=_params(),
        interpret=interpret,
        cost_estimate=_estimate(rows, k, products=4, moved=2),
        name="selected_backward_kv",
    )(block, used, rows, d_rows, sums, order[:, :, None], k, v, k_order[..., None], *d_keys)


# --- Kernels --------------------------------------------------------------------------------------


def _forward_kernel(block, used, rows, order, k, v, k_order, out, lse, *, scale):
    @pl.when(pl.program_id(1) < used[pl.program_id(0)])
    def _():
        # A tile meets its whole block at once, so no running sums are needed. In a column that sees
        # nothing every score is MASKED: lse is then about MASKED, by which ``merge`` knows it.
        scores = _scores(rows, order, k, k_order, scale)
        top = jnp.max(scores, axis=0, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=0, keepdims=True)
        out[0, 0] = _dot((weights / total).astype(v.dtype), v[0, 0, 0], 0, 0).astype(out.dtype)
        lse[0, 0] = top + jnp.log(total)


def _backward_q_kernel(block, used, rows, d_rows, sums, order, k, v, k_order, dq, *, scale):
    @pl.when(pl.program_id(1) < used[pl.program_id(0)])
    def _():
        _, d_scores = _slopes(rows, d_rows, sums, order, k, v, k_order, scale)
        dq[0, 0] = _dot(d_scores, k[0, 0, 0], 0, 0)


def _backward_kv_kernel(
    block, used, rows, d_rows, sums, order, k, v, k_order, dk_before, dv_before, dk, dv,
    *, scale
):  # fmt: skip
    row = pl.program_id(0)
    tile = pl.program_id(1)
    # steps past the last tile in use stay at its block, as the index maps do
    last = jnp.maximum(used[row] - 1, 0)
    now, before = (block[row, jnp.clip(x, 0, last)] for x in (tile, tile - 1))

    # the first tile of a block: start from the sums of the turns before
    @pl.when((tile == 0) | (now != before))
    def _():
        dk[...] = dk_before[...]
        dv[...] = dv_before[...]

    @pl.when(tile < used[row])
    def _():
        weights, d_scores = _slopes(rows, d_rows, sums, order, k, v, k_order, scale)
        dk[0, 0] += _dot(d_scores, rows[0, 0], 1, 0)
        dv[0, 0] += _dot(weights.astype(v.dtype), d_rows[0, 0], 1, 0)


def _slopes(rows, d_rows, sums, order, k, v, k_order, scale):
    """(weights, gradients of the scores in the keys' dtype), both transposed [size, R G]."""
    lse, delta = (sums[0, 0, i : i + 1] for i in range(2))
    weights = jnp.exp(_scores(rows, order, k, k_order, scale) - lse)
    d_weights = _dot(v[0, 0, 0], d_rows[0, 0], 1, 1)
    return weights, (weights * (d_weights - delta) * scale).astype(k.dtype)


def _scores(rows, order, k, k_order, scale):
    """Masked and transposed scores [size, R G]; MASKED where the key's order exceeds the row's."""
    scores = _dot(k[0, 0, 0], rows[0, 0], 1, 1) * scale
    return jnp.where(k_order[0, 0] <= order[0, 0], scores, MASKED)


def _dot(a, b, a_axis: int, b_axis: int):
    """a and b multiplied and summed over an axis of each, in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


# --- What a grid step holds -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Specs:
    """The blocks of a grid step (list, tile).

    Steps past the last tile in use keep the blocks of that tile, so that nothing is fetched for
    them.
    """

    # E.
    lists: int
    # [B, K, J, size, H].
    keys_shape: tuple[int, ...]

    def tile(self, rows: int, lanes: int) -> pl.BlockSpec:
        """One tile of [E, L, rows, lanes]."""
        return pl.BlockSpec(
            (1, 1, rows, lanes), lambda e, l, block, used: (e, _tile(e, l, used), 0, 0)
        )

    def rows(self, rows: int, head_dim: int) -> list[pl.BlockSpec]:
        """A tile of rows, of their cotangents, of their sums and of their order."""
        wide = self.tile(rows, head_dim)
        return [wide, wide, self.tile(2, rows), self.tile(1, rows)]

    def keys(self) -> list[pl.BlockSpec]:
        """The chosen block of keys, of values and of their order [B, J, size, 1]."""
        batch, heads, _, size, head_dim = self.keys_shape
        lists = self.lists // batch

        def at(e, l, block, used):
            # // and % would ask which TPU this is, which is not known while compiling for one that
            # is not here
            # list ``rest`` of the row's P belongs to its key/value head rest K / P
            row = jax.lax.div(e, jnp.int32(lists))
            rest = jax.lax.rem(e, jnp.int32(lists))
            return (
                row,
                jax.lax.div(rest * heads, jnp.int32(lists)),
                block[e, _tile(e, l, used)],
                0,
                0,
            )

        def order_at(*step):
            row, _, *rest = at(*step)
            return row, *rest

        keys = pl.BlockSpec((1, 1, 1, size, head_dim), at)
        return [keys, keys, pl.BlockSpec((1, 1, size, 1), order_at)]

    def sums(self) -> pl.BlockSpec:
        """The chosen block of [E, J, size, H]."""
        return pl.BlockSpec(
            (1, 1, *self.keys_shape[3:]),
            lambda e, l, block, used: (e, block[e, _tile(e, l, used)], 0, 0),
        )


def _tile(e, l, used):
    return jnp.minimum(l, jnp.maximum(used[e] - 1, 0))


def _params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
    )


def _estimate(rows: jax.Array, k: jax.Array, products: int, moved: int) -> pl.CostEstimate:
    """products: dot products for each row and key. moved: how often the rows' bytes are moved."""
    pairs = rows.size // rows.shape[-1] * k.shape[3]
    cost = Cost(products * 2 * rows.shape[-1] * pairs, pairs, moved * rows.nbytes)
    return pl.CostEstimate(**dataclasses.asdict(cost))
