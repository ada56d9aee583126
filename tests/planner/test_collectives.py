"""What devices send each other, read from compiled programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from planner.collectives import Kind, device_groups, sent_bytes
from planner.hlo import Instruction

X = jnp.ones((8, 16), jnp.float32)


def sent(function, axes: dict[str, int], spec: P, out: P, domain: int = 8) -> dict[Kind, float]:
    """What a function sends whose argument is X, cut over a mesh."""
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)
    cut = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False)
    return sent_bytes(jax.jit(cut).lower(X).compile().as_text(), domain)


def test_a_sum_counts_once_per_trip_and_twice_but_for_the_own_part():
    def loop(x):
        return jax.lax.fori_loop(0, 5, lambda _, y: jnp.sin(jax.lax.psum(y, "a")), x)

    found = sent(loop, {"a": 8}, P(None, None), P(None, None))
    assert found == {Kind("all-reduce", 8, False): 5 * 2 * 7 / 8 * X.nbytes}


def test_a_gather_counts_the_result_without_the_own_part():
    def gather(x):
        return jax.lax.all_gather(x, "a", axis=0, tiled=True)

    found = sent(gather, {"a": 8}, P("a"), P(None))
    assert found == {Kind("all-gather", 8, False): 7 / 8 * X.nbytes}


def test_a_scattered_sum_counts_every_part_but_the_own():
    def scatter(x):
        return jax.lax.psum_scatter(x, "a", tiled=True)

    found = sent(scatter, {"a": 8}, P(None, None), P("a"))
    # XLA may write it as a sum and a slice
    assert sum(found.values()) in (7 / 8 * X.nbytes, 2 * 7 / 8 * X.nbytes)


@pytest.mark.parametrize("axis, leaves", [("a", True), ("b", False)])
def test_an_axis_of_large_stride_leaves_the_domain(axis, leaves):
    found = sent(
        lambda x: jax.lax.psum(x, axis), {"a": 2, "b": 4}, P(None, None), P(None, None), domain=4
    )
    (kind,) = found
    assert kind.leaves_domain == leaves and kind.devices == {"a": 2, "b": 4}[axis]


def test_a_permutation_counts_what_each_device_sends():
    def turn(x):
        return jax.lax.ppermute(x, "a", [(i, (i + 1) % 8) for i in range(8)])

    found = sent(turn, {"a": 8}, P("a"), P("a"))
    assert list(found.values()) == [X.nbytes / 8]


def test_a_ragged_exchange_counts_what_there_is_to_send_and_not_the_room_for_more():
    text = """HloModule m

ENTRY %main (x: bf16[4,8], into: bf16[16,8], n: s32[2]) -> bf16[16,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %into = bf16[16,8]{1,0} parameter(1)
  %n = s32[2]{0} parameter(2)
  ROOT %out = bf16[16,8]{1,0} ragged-all-to-all(%x, %into, %n, %n, %n, /*index=5*/%n), replica_groups={{0,1}}
}
"""
    assert sent_bytes(text, 8) == {Kind("ragged-all-to-all", 2, False): 4 * 8 * 2 / 2}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("replica_groups={{0,2},{1,3}}, x", [[0, 2]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['data'=2,'tensor'=2] {'data'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['data'=2,'tensor'=2] {'tensor'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['data'=2,'tensor'=2] {'data','tensor'}, x", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=8] {'a':(2)4}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(1)2}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_groups_are_read_in_every_way_that_xla_writes_them(text, expected):
    found = device_groups(Instruction("sum", "f32[2]", "all-reduce", text))
    assert np.array_equal(found, expected)


def test_groups_written_in_another_way_are_an_error():
    with pytest.raises(ValueError, match="which devices take part is not known: all-reduce"):
        device_groups(Instruction("sum", "f32[2]", "all-reduce", "replica_groups=?"))


def test_the_result_of_an_asynchronous_collective_counts_once():
    text = """HloModule jit_f
ENTRY %main (x: bf16[4,8]) -> bf16[8,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %s = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%x), replica_groups=[1,2]<=[2]
  ROOT %d = bf16[8,8]{1,0} all-gather-done(%s)
}
"""
    assert sent_bytes(text, 8) == {Kind("all-gather", 2, False): 8 * 8 * 2 / 2}
