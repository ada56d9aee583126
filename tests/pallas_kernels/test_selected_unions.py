"""Tiles of neighbouring queries that go through the union of their blocks equal the definition, and
give way to the index where their unions are too large.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.selected import reference, unions
from pallas_kernels.selected.api import selected_attention
from pallas_kernels.selected.tuning import TuningConfig, heuristic
from tests.attention.rows import normal
from tests.pallas_kernels.judge import judge, masked_places_may_hold_anything
from tests.pallas_kernels.test_selected import (
    ALONE,
    TPU,
    check,
    choose,
    equations,
    orders,
    small_tiles,  # noqa: F401
)

# Tiles of 8 to 24 queries, and steps of two blocks of 8.
SMALL = TPU | {"tuning": TuningConfig(chunk=32, rows=24, keys=16)}


@pytest.fixture
def any_size(monkeypatch, small_tiles):  # noqa: F811
    """Unions of any size and of few rows are gone through."""
    monkeypatch.setattr(unions, "MIN_ROWS", 1)
    monkeypatch.setattr(unions, "INDEX_MOVES", 10**9)


def called(function, *arguments) -> set[str]:
    """The names of the kernels that a program calls."""
    program = jax.make_jaxpr(function)(*arguments)
    found = (x for x in equations(program.jaxpr) if x.primitive.name == "pallas_call")
    return {str(x.params["name"]) for x in found}


@pytest.mark.parametrize(
    "heads, kv_heads, lists, length, batch",
    [(4, 2, 2, 27, 2), (2, 1, 2, 40, 1), (7, 1, 1, 33, 1), (16, 1, 1, 5 + ALONE, 2)],
)
@pytest.mark.long
def test_unions_equal_the_definition_in_values_and_gradients(
    x64, any_size, heads, kv_heads, lists, length, batch
):
    check(heads, kv_heads, lists, size=8, blocks=4, length=length, batch=batch, **SMALL)


@pytest.mark.long
def test_unions_in_bfloat16_are_no_worse_than_the_definition_in_bfloat16(x64, any_size):
    check(4, 1, 1, size=16, blocks=4, length=24, head_dim=32, dtype=jnp.bfloat16, **SMALL)


@pytest.mark.long
def test_a_chunk_with_large_unions_goes_by_the_index(x64, monkeypatch, any_size):
    """The first chunk chooses alike, the second one does not; both are right."""
    monkeypatch.setattr(unions, "STEP_BYTES", 0)
    monkeypatch.setattr(unions, "INDEX_MOVES", 1)
    monkeypatch.setattr(unions, "FLOPS_PER_BYTE", 8)
    (batch, length, size, blocks) = (1, 32, 8, 12)
    picks = choose(batch, length, 1, blocks, 3)
    picks[:, :16] = picks[:, :1]
    order = orders(batch, length, blocks * size)
    keys = (batch, blocks * size, 1, 8)
    inputs = normal(0, (batch, length, 2, 8), keys, keys, dtype=jnp.float64)
    given = {"picks": picks, "q_order": order[0], "k_order": order[1], "size": size}
    sizes = TuningConfig(chunk=16, rows=32, keys=8)
    plan = unions.plan(16, 1, 3, blocks, 2, size, 8, 4, sizes)
    assert plan is not None and not plan.always
    used = [
        int(unions.visits(jnp.asarray(x), plan).used) for x in (picks[0, :16, 0], picks[0, 16:, 0])
    ]
    assert used[0] <= plan.steps < used[1]
    options = TPU | {"tuning": sizes}
    function = functools.partial(selected_attention, **given, **options)
    judge(function, functools.partial(reference.attention, **given), inputs, jnp.float32)
    narrow = [x.astype(jnp.float32) for x in inputs]
    names = called(jax.grad(lambda *x: function(*x)[0].sum(), (0, 1, 2)), *narrow)
    assert {"selected_union_forward", "selected_forward"} < names
    assert {"selected_union_backward_q", "selected_backward_q", "selected_backward_kv"} < names


@pytest.mark.long
def test_an_empty_place_may_hold_anything_to_unions(any_size):
    picks = choose(1, 24, 1, 4, 3)
    q_order, k_order = orders(1, 24, 32)
    arrays = normal(0, (1, 24, 2, 16), *[(1, 32, 1, 16)] * 2)
    given = dict(picks=picks, q_order=q_order, k_order=k_order, size=8)
    function = functools.partial(selected_attention, **given, **SMALL)
    empty = k_order < np.iinfo(np.int32).max
    asking = np.arange(24)[None] != ALONE  # which sees nothing
    masked_places_may_hold_anything(function, arrays, [asking, empty, empty])


@pytest.mark.parametrize("length, queries, width", [(43, 8, 2), (32, 32, 1), (9, 4, 16)])
def test_every_pick_is_a_bit_of_its_block_in_a_step_of_its_tile(length, queries, width):
    picks = choose(1, length, 1, 6, 3)[0, :, 0]
    plan = unions.Plan(queries, -(-length // queries), width, 7 * -(-length // queries), True)
    found = jax.tree.map(np.asarray, unions.visits(jnp.asarray(picks), plan))
    assert np.all(np.diff(found.tile[: found.used]) >= 0)
    assert set(found.tile[: found.used]) == set(range(plan.tiles))
    pairs = []
    for step in range(found.used):
        for place in range(step * width, (step + 1) * width):
            bits = int(found.chosen[place]) & 0xFFFFFFFF
            own = [found.tile[step] * queries + i for i in range(32) if bits >> i & 1]
            pairs += [(query, found.block[place]) for query in own]
    wanted = [(query, block) for query, own in enumerate(picks) for block in own if block >= 0]
    assert sorted(pairs) == sorted(wanted)
    for tile in range(plan.tiles):
        union = np.unique(picks[tile * queries : (tile + 1) * queries])
        assert np.sum(found.tile[: found.used] == tile) == max(1, -(-np.sum(union >= 0) // width))


def test_the_bound_is_where_the_header_says():
    """Nothing is gone through that would be slower; few heads to a list leave it to the index."""
    sizes = heuristic("tpu")
    shape = dict(chunk=4096, picks=16, blocks=1024, size=64, head_dim=128, itemsize=2)
    found = {
        groups: unions.plan(lists=4, groups=groups, tuning=sizes, **shape)
        for groups in (1, 2, 4, 16)
    }
    assert found[1] is None and found[2] is None
    each = {groups: x.steps * x.width // x.tiles for groups, x in found.items() if x}
    assert each == {4: 32, 16: 88}  # whole steps of 8 blocks, up to 40 and 90
    short = unions.plan(lists=4, groups=16, tuning=sizes, **shape | {"blocks": 64})
    assert short.always
    # of many lists, no more than the scalar memory holds
    many = unions.plan(lists=64, groups=4, tuning=sizes, **shape | {"chunk": 1024})
    assert 64 * many.steps * (1 + 2 * many.width) <= unions.MAX_NUMBERS
    assert unions.plan(lists=4, groups=16, tuning=TuningConfig(by_tile=False), **shape) is None


def test_the_default_sizes_go_through_unions(small_tiles):  # noqa: F811
    """A model's shape takes the unions without being told to."""
    q = jnp.zeros((1, 64, 4, 128), jnp.float32)
    k = jnp.zeros((1, 512, 1, 128), jnp.float32)
    picks = jnp.zeros((1, 64, 1, 8), jnp.int32)
    order = jnp.zeros((1, 512), jnp.int32)
    options = TPU | {"tuning": None}
    given = (picks, order[:, :64], order)
    names = called(lambda *x: selected_attention(*x, *given, size=64, **options)[0], q, k, k)
    assert names == {"selected_union_forward"}
