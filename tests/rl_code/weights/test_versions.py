"""Properties of checksums and of what is configured."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rl_code.checkpoint import checksums as checksums_lib
from rl_code.checkpoint.checksums import checksums, unsigned
from rl_code.weights.versions import (
    TransferStats,
    Version,
    Wanted,
    WeightError,
    WeightsConfig,
    check,
    refuse_other,
)
from tests.rl_code.weights.small import mesh

DTYPES = ("float32", "bfloat16", "float16", "int32", "int16", "int8", "uint8", "float8_e4m3fn")


def array_of(bits: np.ndarray, dtype: str) -> jax.Array:
    return jax.device_put(bits.view(jnp.dtype(dtype)))


def random_bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    kind = unsigned(jnp.dtype(dtype))
    return np.random.default_rng(seed).integers(0, np.iinfo(kind).max, shape, kind, endpoint=True)


def checksum(x: jax.Array) -> str:
    return checksums({"x": x})["x"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flip_of_a_single_bit_changes_both_sums(dtype):
    bits = random_bits((2, 3), dtype)
    before = checksum(array_of(bits, dtype))
    for index in np.ndindex(bits.shape):
        for bit in range(8 * bits.itemsize):
            flipped = bits.copy()
            flipped[index] ^= bits.dtype.type(1 << bit)
            after = checksum(array_of(flipped, dtype))
            assert after[:8] != before[:8] and after[8:] != before[8:]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=12, max_size=12), st.permutations(range(12)))
def test_any_other_order_of_the_elements_changes_it(values, order):
    bits = np.array(values, np.uint16)
    moved = bits[np.array(order)]
    same = checksum(array_of(bits, "bfloat16")) == checksum(array_of(moved, "bfloat16"))
    assert same == (bits == moved).all()


def test_two_elements_that_swap_places_change_it():
    bits = np.zeros((4, 4), np.uint32)
    bits[1, 2] = 1
    found = set()
    for index in np.ndindex(bits.shape):
        moved = np.zeros_like(bits)
        moved[index] = 1
        found.add(checksum(array_of(moved, "float32")))
    assert len(found) == bits.size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_does_not_depend_on_the_sharding(dtype):
    x = array_of(random_bits((8, 16, 3), dtype), dtype)
    expected = checksum(x)
    whole = mesh(2, 4)
    apart = mesh(1, 2, devices=jax.devices()[4:6])
    for where, spec in (
        (whole, P()),
        (whole, P("tensor", "data")),
        (apart, P(None, ("data", "tensor"))),
    ):
        assert checksum(jax.device_put(x, NamedSharding(where, spec))) == expected
    assert checksum(jax.device_put(x, jax.devices()[3])) == expected


def test_it_is_what_its_definition_says_in_integers():
    bits = random_bits((3, 4), "float32")
    murmur = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)
    lowbias = (16, 0x21F0AAAD, 15, 0xD35A2D97, 15)
    expected = ""
    for mix in (functools.partial(_mixed, murmur), functools.partial(_mixed, lowbias)):
        rows = [mix(i + 0x9E3779B9) for i in range(3)]
        columns = [mix(j + 2 * 0x9E3779B9) for j in range(4)]
        total = sum(mix(int(bits[i, j]) + rows[i] + columns[j]) for i in range(3) for j in range(4))
        expected += f"{total % 2**32:08x}"
    assert checksum(array_of(bits, "float32")) == expected


def _mixed(constants: tuple[int, ...], x: int) -> int:
    a, m, b, n, c = constants
    x %= 2**32
    x = (x ^ (x >> a)) * m % 2**32
    x = (x ^ (x >> b)) * n % 2**32
    return x ^ (x >> c)


def test_it_tells_bits_apart_that_are_equal_as_numbers():
    zeros = [jnp.array([0.0]), jnp.array([-0.0])]
    nans = [
        array_of(np.array([bits], np.uint32), "float32")
        for bits in (0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001)
    ]
    denormals = [array_of(np.array([bits], np.uint32), "float32") for bits in (1, 2, 0x80000001)]
    found = [checksum(x) for x in (*zeros, *nans, *denormals)]
    assert len(set(found)) == len(found)


def test_names_shapes_and_dtypes_count():
    x = jnp.arange(6, dtype=jnp.int32)
    others = [
        {"y": x},
        {"x": x.reshape(2, 3)},
        {"x": jax.lax.bitcast_convert_type(x, jnp.float32)},
        {"x": x, "y": x},
        {},
    ]
    found = {Version.of(0, named).checksum for named in ({"x": x}, *others)}
    assert len(found) == 1 + len(others)
    assert Version.of(0, {"x": x, "y": x}) == Version.of(0, {"y": x, "x": x})


def test_a_version_survives_json():
    version = Version.of(3, {"x": jnp.arange(6.0)})
    assert Version.from_json(version.to_json()) == version


def test_a_failed_check_names_both_checksums_the_array_and_the_source():
    good = {"x": jnp.zeros(3), "y": jnp.zeros(3)}
    bad = {"x": jnp.zeros(3), "y": jnp.ones(3)}
    version = Version.of(4, good)
    check(version, good, "the disk")
    now = Version.of(4, bad).checksum
    then = version.checksum
    with pytest.raises(
        WeightError,
        match=f"version 4 from the disk has checksum {now} instead of {then}; different: y$",
    ):
        check(version, bad, "the disk")
    with pytest.raises(
        WeightError, match=f"version 4 .* the disk with checksum {then}, and now again with {now}"
    ):
        refuse_other(version, Version.of(4, bad), "the disk")


def test_another_model_is_named():
    version = Version.of(4, {"x": jnp.zeros(3), "y": jnp.zeros(3)})
    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.raises(WeightError, match=r"y is float32\[3\] there and bfloat16\[3\] here"):
        version.check_kinds({"x": x, "y": jax.ShapeDtypeStruct((3,), jnp.bfloat16)})
    with pytest.raises(WeightError, match=r"y is float32\[3\] there and missing here"):
        version.check_kinds({"x": x})


def test_a_checksum_takes_no_memory_beside_its_array():
    x = jnp.zeros((64, 4096))
    memory = jax.jit(checksums_lib._sums).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < x.nbytes / 100


@pytest.mark.parametrize("dtype", ["bool", "complex64", ml_dtypes.int4])
def test_dtypes_without_whole_bytes_of_a_number_are_refused(dtype):
    with pytest.raises(TypeError, match="are not supported"):
        checksum(jnp.zeros(2, dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full_every": 0}, "full_every=0 must be at least 1"),
        ({"keep": 0}, "keep=0 must be at least 1"),
        ({"deadline_s": 0.0}, "deadline_s=0.0 must be positive"),
        ({"deadline_s": float("nan")}, "deadline_s=nan must be positive"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_value(change, message):
    with pytest.raises(ValueError, match=message):
        WeightsConfig(**({"full_every": 1, "keep": 1, "deadline_s": 1.0} | change))


def test_exactly_one_wish():
    for wish in ({}, {"at_least": 1, "exactly": 1}):
        with pytest.raises(ValueError, match="give one of at_least"):
            Wanted(**wish)
    assert (
        Wanted(at_least=2).choose([1, 2, 3]) == 3 and Wanted(at_least=4).choose([1, 2, 3]) is None
    )
    assert Wanted(exactly=2).choose([1, 2, 3]) == 2 and not Wanted(at_least=4).gone([5])
    assert Wanted(exactly=2).gone([1, 3]) and not Wanted(exactly=2).gone([1])


def test_metrics_are_named_by_what_was_done():
    metrics = TransferStats("publish", 3, 0.5, delta_bytes=7).metrics()
    assert metrics["weights/publish_s"] == 0.5 and metrics["weights/publish_delta_bytes"] == 7.0
    assert TransferStats("fetch", 3).metrics().keys().isdisjoint(metrics)
