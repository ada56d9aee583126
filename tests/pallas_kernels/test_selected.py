"""The kernels of chosen blocks equal the definition in float64, in values and gradients, whatever
was chosen.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import ClosedJaxpr, Jaxpr

from pallas_kernels.flash import reference as dense
from pallas_kernels.selected import by_block, chunks, gpu, reference, tpu
from pallas_kernels.selected.api import selected_attention
from pallas_kernels.selected.tiles import spans, tiles
from pallas_kernels.selected.tuning import TuningConfig
from pallas_kernels.tokens import sequences
from tests.attention.rows import relative
from tests.pallas_kernels.judge import (
    defined,
    judge,
    masked_places_may_hold_anything,
    normal,
    not_finite_reaches_only_those_who_see_it,
)

TPU = {
    "implementation": "tpu",
    "interpret": pltpu.InterpretParams(
        detect_races=True, dma_execution_mode="eager", uninitialized_memory="nan"
    ),
    "tuning": TuningConfig(chunk=32, rows=48),
}
GPU = {
    "implementation": "gpu",
    "interpret": plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
}
REFERENCE = {"implementation": "reference"}
KERNELS = {"reference": REFERENCE, "tpu": TPU, "gpu": GPU}
# The query without picks, and the block that nobody picks.
ALONE, UNPICKED = 5, 2


# one program each instead of many small ones
jit_tiles = jax.jit(tiles, static_argnums=(1, 2, 3))
jit_spans = jax.jit(spans, static_argnums=(1, 2))
jit_turn = jax.jit(by_block.turn, static_argnames=("tiles", "spans"))


@pytest.fixture
def small_tiles(monkeypatch):
    """Chunks of 16 queries, and tiles as small as their rows allow."""
    monkeypatch.setattr(chunks, "MIN_CHUNK", 16)
    monkeypatch.setattr(tpu, "LANES", 16)


def choose(batch: int, length: int, lists: int, blocks: int, picks: int) -> np.ndarray:
    """Random distinct blocks, some missing; all those of query ALONE, and block UNPICKED
    everywhere.
    """
    rng = np.random.default_rng(0)
    found = np.argsort(rng.random((batch, length, lists, blocks)), axis=-1)[..., :picks].astype(
        np.int32
    )
    found[(rng.random(found.shape) < 0.2) | (found == UNPICKED)] = -1
    found[:, ALONE] = -1
    return found


def orders(batch: int, length: int, places: int) -> tuple[np.ndarray, np.ndarray]:
    """Of queries and of keys, shuffled; one place is empty."""
    rng = np.random.default_rng(1)
    q, k = (
        rng.permuted(np.tile(np.arange(x, dtype=np.int32), (batch, 1)), axis=1)
        for x in (length, places)
    )
    k[:, 3] = np.iinfo(np.int32).max
    return q, k


def seen_by(picks, q_order, k_order, size: int) -> np.ndarray:
    """bool [B, T, lists, S], which keys a query sees."""
    chosen = (picks[..., None] == np.arange(k_order.shape[1]) // size).any(axis=3)
    return chosen & (k_order[:, None] <= q_order[..., None])[:, :, None]


def check(
    heads,
    kv_heads,
    lists,
    size,
    blocks,
    length,
    picks=3,
    head_dim=8,
    batch=1,
    dtype=jnp.float32,
    gradients=True,
    **options,
):
    """Values and gradients against the definition."""
    picks = choose(batch, length, lists, blocks, picks)
    order = orders(batch, length, blocks * size)
    keys = (batch, blocks * size, kv_heads, head_dim)
    inputs = normal(0, (batch, length, heads, head_dim), keys, keys, dtype=jnp.float64)
    given = {"picks": picks, "q_order": order[0], "k_order": order[1], "size": size}
    naive = functools.partial(reference.attention, **given)
    kernel = functools.partial(selected_attention, **given, **options)
    mask = np.repeat(seen_by(picks, *order, size), heads // lists, axis=2)
    definition = functools.partial(defined, mask=mask)
    _, slopes, lse = judge(kernel, definition, inputs, dtype, naive=naive, gradients=gradients)
    assert not np.isfinite(lse)[:, ALONE].any()
    if not gradients:
        return
    dq, dk, dv = slopes
    assert not np.any(dq[:, ALONE])
    unpicked = slice(UNPICKED * size, (UNPICKED + 1) * size)
    assert not np.any(dk[:, unpicked]) and not np.any(dv[:, unpicked])


def test_the_reference_equals_the_definition_in_values_and_gradients(x64):
    check(4, 2, 4, size=8, blocks=4, length=27, dtype=jnp.float64, **REFERENCE)


# 16 heads share a key/value head in bfloat16
@pytest.mark.parametrize("heads, kv_heads, lists", [(4, 2, 2), (2, 1, 2), (7, 1, 1)])
@pytest.mark.long
def test_tpu_equals_the_definition_in_values_and_gradients(
    x64, small_tiles, heads, kv_heads, lists
):
    check(heads, kv_heads, lists, size=8, blocks=4, length=27, **TPU)


@pytest.mark.parametrize("size, length, gradients", [(64, 150, True), (128, ALONE + 1, False)])
@pytest.mark.long
def test_tpu_takes_larger_blocks_and_tiles_as_they_are(x64, size, length, gradients):
    options = TPU | {"tuning": None}
    check(3, 1, 1, size, blocks=3, length=length, head_dim=16, gradients=gradients, **options)


@pytest.mark.long
def test_tpu_in_bfloat16_is_no_worse_than_the_definition_in_bfloat16(x64, small_tiles):
    check(16, 1, 1, size=16, blocks=4, length=16, batch=2, head_dim=32, dtype=jnp.bfloat16, **TPU)


# the interpreter has no wgmma accumulators beside shared memory: its products are jnp's, all else
# is as on the device
@pytest.mark.parametrize(
    "unit, heads, kv_heads, lists, size, span_kv, chunk, length",
    [
        ("wgmma", 3, 1, 1, 64, 1, 64, 90),
        ("tcgen05", 2, 1, 2, 128, 4, 128, 140),
        # tiles of 8 and of 16 queries, which the kernel gathers, several in a block's two spans
        ("wgmma", 16, 1, 1, 64, 2, 32, 40),
        ("tcgen05", 16, 2, 2, 64, 2, 32, 40),
    ],
)
@pytest.mark.long
def test_gpu_equals_the_definition_in_bfloat16_in_values_and_gradients(
    x64, small_tiles, unit, heads, kv_heads, lists, size, span_kv, chunk, length
):
    sizes = TuningConfig(chunk=chunk, span=2, span_kv=span_kv, matrix_unit=unit)
    options = GPU | {"tuning": sizes}
    check(
        heads,
        kv_heads,
        lists,
        size,
        blocks=3,
        length=length,
        head_dim=16,
        dtype=jnp.bfloat16,
        **options,
    )


def test_all_blocks_are_dense_causal_attention(x64):
    tokens = sequences(jnp.array([24]), 24)
    size = 8
    qkv = normal(0, (1, 24, 2, 8), *[(1, 24, 1, 8)] * 2, dtype=jnp.float64)
    picks = np.broadcast_to(np.arange(3, dtype=np.int32), (1, 24, 1, 3))
    given = (picks, tokens.order, tokens.order)

    @jax.jit
    def both(*qkv):
        found = selected_attention(*qkv, *given, size=size, **REFERENCE)
        return found, dense.attention(*qkv, tokens, tokens)

    for one, expected in zip(*both(*qkv), strict=True):
        assert relative(one, expected) < 1e-12


QUERIES = 16


@functools.cache
def small(kind: str):
    """(a kernel of few queries, its inputs, its picks and orders), the same for all tests.

    That for GPUs gathers its queries itself.
    """
    size, heads = (64, 8) if kind == "gpu" else (8, 2)
    given = dict(picks=choose(1, QUERIES, 1, 3, 2), size=size)
    given["q_order"], given["k_order"] = orders(1, QUERIES, 3 * size)
    dtype = jnp.bfloat16 if kind == "gpu" else jnp.float32
    arrays = normal(0, (1, QUERIES, heads, 16), *[(1, 3 * size, 1, 16)] * 2, dtype=dtype)
    return functools.partial(selected_attention, **given, **KERNELS[kind]), arrays, given


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.quick(first=1)
def test_an_empty_place_may_hold_anything(small_tiles, kind):
    function, arrays, given = small(kind)
    empty = given["k_order"] < np.iinfo(np.int32).max
    asking = np.arange(QUERIES)[None] != ALONE  # which sees nothing
    masked_places_may_hold_anything(function, arrays, [asking, empty, empty])


@pytest.mark.parametrize("kind, turn", [("reference", None), ("tpu", 0), ("gpu", 1)])
@pytest.mark.quick(first=1)
def test_values_that_are_not_finite_reach_only_those_who_see_them(small_tiles, kind, turn):
    function, arrays, given = small(kind)
    sees = seen_by(**given)[:, :, 0]
    key, query = sees[0].sum(axis=0).argmax(), sees[0].sum(axis=1).argmax()
    not_finite_reaches_only_those_who_see_it(function, arrays, sees, query, key, turn)


def test_tpu_does_not_read_blocks_that_were_not_chosen(small_tiles):
    picks = choose(1, 24, 1, 4, 3)
    order = orders(1, 24, 32)
    q, k, v = normal(0, (1, 24, 2, 8), *[(1, 32, 1, 8)] * 2)
    attend = jax.jit(lambda *x: selected_attention(*x, picks, *order, size=8, **TPU))
    clean = jax.device_get(attend(q, k, v))
    for x in (k, v):
        x[:, UNPICKED * 8 : UNPICKED * 8 + 8] = np.nan
    for found, expected in zip(attend(q, k, v), clean, strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("queries, multiple", [(1, 1), (4, 1), (5, 3), (64, 1)])
def test_every_pick_is_in_one_row_of_a_tile_of_its_block(queries, multiple):
    picks = choose(1, 43, 1, 6, 3)[0, :, 0]
    found = jax.device_get(jit_tiles(jnp.asarray(picks), 6, queries, multiple))
    assert len(found.block) % multiple == 0 and np.all(np.diff(found.block) >= 0)
    rows = found.query.reshape(-1)
    for query, own in enumerate(picks):
        for pick, row in zip(own, found.row[query], strict=True):
            assert (
                row == rows.size
                if pick < 0
                else rows[row] == query and found.block[row // queries] == pick
            )
    assert np.sum(rows < len(picks)) == np.sum(picks >= 0)
    for block in range(6):
        own = range(found.starts[block], found.starts[block + 1])
        assert len(own) == -(-np.sum(picks == block) // queries) and np.all(
            found.block[own] == block
        )
    assert np.all(found.query[found.starts[-1] :] == len(picks))


@pytest.mark.parametrize("most", [2, 1, 100])
@pytest.mark.quick(first=1)
def test_every_tile_is_in_one_span_of_its_block_and_every_span_in_one_turn(most):
    picks = choose(1, 43, 1, 6, 3)[0, :, 0]
    found = jit_tiles(jnp.asarray(picks), 6, 2)
    count = len(found.block)
    cut_up = jit_spans(found.starts, count, most)
    for block in range(6):
        own = range(cut_up.starts[block], cut_up.starts[block + 1])
        assert all(int(cut_up.block[span]) == block for span in own)
        assert all(cut_up.last[span] - cut_up.first[span] <= most for span in own)
        held = [tile for span in own for tile in range(cut_up.first[span], cut_up.last[span])]
        assert held == list(range(found.starts[block], found.starts[block + 1]))
    used = int(cut_up.starts[-1])
    begin = 0
    seen = []
    while begin < used:
        query, mine, taken = jit_turn(begin, cut_up, found.query, tiles=max(most, 7), spans=3)
        assert taken > 0
        for span in range(int(taken)):
            at = int(cut_up.first[begin + span] - cut_up.first[begin])
            assert int(mine.first[span]) == at and int(mine.block[span]) in range(6)
            for tile in range(at, int(mine.last[span])):
                seen.append(int(cut_up.first[begin]) + tile)
                assert np.array_equal(query[tile], found.query[seen[-1]])
        assert not np.any(mine.last[int(taken) :])
        begin += int(taken)
    assert seen == list(range(found.starts[-1]))


def test_without_an_accelerator_the_definition_is_chosen(x64):
    picks = choose(1, 12, 1, 4, 2)
    order = orders(1, 12, 32)
    qkv = normal(0, (1, 12, 2, 8), *[(1, 32, 1, 8)] * 2, dtype=jnp.float64)
    results = (
        jax.jit(functools.partial(f, size=8))(*qkv, picks, *order)
        for f in (selected_attention, reference.attention)
    )
    for found, expected in zip(*results, strict=True):
        assert found.dtype == jnp.float64 and np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "triton"}, "implementation='triton' must be one of"),
        ({"implementation": "tpu"}, "backend='cpu' is not 'tpu', and interpret=False"),
        ({"interpret": TPU["interpret"]}, "needs a named implementation, not implementation=None"),
        ({"lists": 3}, r"picks.shape=\(1, 12, 3, 2\) must begin with \(1, 12\) and 1 or 2 lists"),
        ({"size": 5}, "size=5 must divide the 32 places of keys"),
        ({"size": 4, **TPU}, "size=4 must be a multiple of 8 up to 512"),
        ({"dtype": jnp.bfloat16, **GPU}, "size=8 must be a multiple of 64"),
        (
            {"head_dim": 160, "size": 64, "blocks": 2, "dtype": jnp.bfloat16, **GPU},
            "head size 160 is more than 128",
        ),
        (GPU, r"the dtypes \['float32'\] must be one of \('bfloat16',\)"),
    ],
)
def test_what_cannot_run_is_refused_with_its_values(options, message):
    own = {"lists": 1, "size": 8, "head_dim": 8, "blocks": 4, "dtype": jnp.float32}
    lists, size, head_dim, blocks, dtype = ({**own, **options}[name] for name in own)
    places = 32 if blocks == 4 else blocks * size
    shape = (1, 12, 2, head_dim)
    qkv = normal(0, shape, *[(1, places, 1, head_dim)] * 2, dtype=dtype)
    options = {name: x for name, x in options.items() if name not in own}
    with pytest.raises(ValueError, match=message):
        selected_attention(
            *qkv, choose(1, 12, lists, blocks, 2), *orders(1, 12, places), size=size, **options
        )


@pytest.mark.parametrize(
    "queries, groups, gathers", [(16, 8, True), (8, 16, True), (2, 64, True), (32, 4, False),
        (1, 128, False), (5, 24, False), (4, 16, False)],
)  # fmt: skip
def test_the_kernel_gathers_whole_rows_of_eight_in_full_tiles(queries, groups, gathers):
    assert gpu.gathers(queries, groups, TuningConfig()) == gathers
    assert not gpu.gathers(queries, groups, TuningConfig(gather_in_kernel=False))
    assert not tpu.gathers(queries, groups, TuningConfig())


def equations(jaxpr):
    """The equations of a program, those of the programs inside of it too."""
    for equation in jaxpr.eqns:
        yield equation
        parameters = list(equation.params.values())
        for x in jax.tree.leaves(parameters, is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
            if isinstance(x, ClosedJaxpr | Jaxpr):
                yield from equations(x.jaxpr if isinstance(x, ClosedJaxpr) else x)


def test_a_querys_sums_and_order_are_copied_to_where_128_bytes_do_not_begin():
    """The interpreter knows no alignment: a copy by a descriptor would fail on the device only."""
    q, k, v = normal(0, *((1, 64, heads, 16) for heads in (8, 1, 1)), dtype=jnp.bfloat16)
    picks = np.zeros((1, 64, 1, 1), np.int32)
    order = np.zeros((1, 64), np.int32)

    def total(q, k, v):
        return selected_attention(q, k, v, picks, order, order, size=64, **GPU)[1].sum()

    program = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, k, v)
    copies = [x for x in equations(program.jaxpr) if x.primitive.name == "copy_gmem_to_smem"]
    modes = {str(x.invars[1].aval.dtype): x.params["oob_mode"] for x in copies}
    plain = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    assert modes == {"bfloat16": None, "float32": plain, "int32": plain}


def test_sizes_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="span=0 must be positive"):
        TuningConfig(span=0)
