"""Properties of bits on disk: whole and as changes they come back exactly."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rl_code.checkpoint.checksums import unsigned
from rl_code.weights import codec
from rl_code.weights.layout import wanted_parts
from rl_code.weights.waiting import Deadline
from tests.rl_code.weights.small import mesh

# -0.0, denormals, infinities and NaNs of all kinds, as float32; their halves are special in 16 bits
SPECIAL = (
    0,
    0x80000000,
    1,
    0x80000001,
    0x007FFFFF,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0x7F800001,
    0xFFFFFFFF,
)
DTYPES = ("float32", "bfloat16", "float16", "int32", "int8")


@st.composite
def two_patterns(draw) -> tuple[str, np.ndarray, np.ndarray]:
    """A dtype, and the bits of two arrays of the same shape."""
    dtype = draw(st.sampled_from(DTYPES))
    kind = unsigned(jnp.dtype(dtype))
    special = st.sampled_from([bits >> (32 - 8 * kind.itemsize) for bits in SPECIAL])
    elements = st.integers(0, int(np.iinfo(kind).max)) | special
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=5))
    one, other = (draw(hnp.arrays(kind, shape, elements=elements)) for _ in range(2))
    return dtype, one, other


def on_device(bits: np.ndarray, dtype: str, sharding=None) -> dict[str, jax.Array]:
    return {"x": jax.device_put(bits.view(jnp.dtype(dtype)), sharding)}


def bits_of(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(unsigned(x.dtype))


def like(named: dict[str, jax.Array], sharding=None) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)
        for name, x in named.items()
    }


@settings(max_examples=40, deadline=None)
@given(two_patterns())
def test_whole_and_change_give_back_every_bit(patterns):
    dtype, one, other = patterns
    old = on_device(one, dtype)
    new = on_device(other, dtype)
    targets = like(old)
    deadline = Deadline(30.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codec.write(folder, "full", codec.to_host(old), deadline)
        codec.write(
            folder, "delta", codec.changes(codec.to_host(new), codec.to_host(old)), deadline
        )
        whole = codec.place(targets, codec.read([folder / "full"], targets, deadline), None)
        change = codec.read([folder / "delta"], targets, deadline)
        both = codec.place(
            targets, codec.read([folder / "full", folder / "delta"], targets, deadline), None
        )
    np.testing.assert_array_equal(bits_of(whole["x"]), one)
    np.testing.assert_array_equal(bits_of(both["x"]), other)
    np.testing.assert_array_equal(bits_of(codec.place(targets, change, old)["x"]), other)
    np.testing.assert_array_equal(bits_of(codec.place(targets, change, new)["x"]), one)


@pytest.mark.parametrize("theirs", [P(), P("tensor"), P("data", "tensor")])
@pytest.mark.parametrize("ours", [P(), P(None, "tensor"), P("tensor", "data")])
@pytest.mark.quick(first=3)
def test_reader_and_writer_may_have_any_layout_and_chunks(theirs, ours, tmp_path, monkeypatch):
    monkeypatch.setattr(codec, "CHUNK_BYTES", 64)
    bits = np.random.default_rng(0).integers(0, 2**16, (8, 12, 5), np.uint16)
    named = on_device(bits, "bfloat16", NamedSharding(mesh(2, 2), theirs))
    host = codec.to_host(named)["x"]
    part = named["x"].sharding.shard_shape(bits.shape)
    assert all(
        size % piece == 0 or size == whole
        for size, piece, whole in zip(part, host.chunk, bits.shape, strict=True)
    )
    assert np.prod(host.chunk) < np.prod(part)
    targets = like(named, NamedSharding(mesh(2, 4), ours))
    for kind in ("full", "delta"):
        codec.write(tmp_path, kind, {"x": host}, Deadline(30.0))
        parts = codec.read([tmp_path / kind], targets, Deadline(30.0))
        assert parts["x"].keys() == wanted_parts(targets["x"]).keys()
        found = codec.place(targets, parts, None)["x"]
        assert found.sharding == targets["x"].sharding
        np.testing.assert_array_equal(bits_of(found), bits)


def test_copies_in_host_memory_survive_donation():
    named = on_device(np.arange(64, dtype=np.uint32), "float32")
    host = codec.to_host(named)
    named = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(named)
    jax.block_until_ready(named)
    ((_, part),) = host["x"].parts.items()
    np.testing.assert_array_equal(part, np.arange(64, dtype=np.uint32))


def test_another_layout_is_noticed():
    bits = np.zeros((4, 4), np.uint32)
    one = on_device(bits, "float32")
    other = on_device(bits, "float32", NamedSharding(mesh(1, 2), P("tensor")))
    assert codec.same_layout(codec.to_host(one), codec.to_host(one))
    assert not codec.same_layout(codec.to_host(one), codec.to_host(other))


def test_a_small_step_is_stored_in_a_fraction(tmp_path):
    rng = np.random.default_rng(0)
    old = rng.normal(0, 0.05, 400_000).astype(np.float32)
    # what AdamW's first update does at such a rate
    new = old + np.float32(1e-5) * rng.choice([-1, 1], old.shape).astype(np.float32)
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        before, after = ({"x": jnp.asarray(x, dtype)} for x in (old, new))
        host = codec.to_host(after)
        for kind, content in (
            ("full", host),
            ("delta", codec.changes(host, codec.to_host(before))),
        ):
            codec.write(tmp_path / dtype, kind, content, Deadline(30.0))
            written = sum(
                path.stat().st_size
                for path in (tmp_path / dtype / kind).rglob("*")
                if path.is_file()
            )
            sizes[dtype, kind] = written / after["x"].nbytes
    assert sizes["float32", "delta"] < 0.6
    changes = bits_of(before["x"]) ^ bits_of(after["x"])
    shares = np.unique(changes, return_counts=True)[1] / changes.size
    entropy = -np.sum(shares * np.log2(shares)) / 16
    assert 0.05 < entropy < sizes["bfloat16", "delta"] < 1.2 * entropy
    assert sizes["float32", "full"] < 0.95 and sizes["bfloat16", "full"] < 0.8


def test_changes_that_were_stored_whole_are_read_too(tmp_path):
    rng = np.random.default_rng(0)
    old, new = (on_device(rng.integers(0, 2**16, (4, 6), np.uint16), "bfloat16") for _ in range(2))
    change = codec.changes(codec.to_host(new), codec.to_host(old))
    codec.write(tmp_path, "full", change, Deadline(30.0))
    (tmp_path / "full").rename(tmp_path / "delta")
    found = codec.read([tmp_path / "delta"], like(old), Deadline(30.0))
    np.testing.assert_array_equal(
        bits_of(codec.place(like(old), found, old)["x"]), bits_of(new["x"])
    )


def test_a_part_of_a_change_that_is_missing_is_an_error_and_not_zeros(tmp_path):
    bits = np.ones((4, 4), np.uint16)
    named = on_device(bits, "bfloat16", NamedSharding(mesh(1, 2), P("tensor")))
    codec.write(tmp_path, "delta", codec.to_host(named), Deadline(30.0))
    folder = tmp_path / "delta" / "x"
    assert sorted(path.name for path in folder.iterdir()) == ["0-2.0-4", "2-4.0-4"]
    shutil.rmtree(folder / "2-4.0-4")
    with pytest.raises(ValueError, match=r"x does not hold all of uint16\[4, 4\]"):
        codec.read([tmp_path / "delta"], like(named), Deadline(30.0))


def test_a_missing_chunk_is_an_error_and_not_zeros(tmp_path):
    named = on_device(np.zeros((4, 4), np.uint32), "float32")
    codec.write(tmp_path, "full", codec.to_host(named), Deadline(30.0))
    (tmp_path / "full" / "x" / "c.0.0").unlink()
    with pytest.raises(ValueError, match="missing"):
        codec.read([tmp_path / "full"], like(named), Deadline(30.0))


def test_arrays_of_another_shape_are_named(tmp_path):
    codec.write(
        tmp_path,
        "full",
        codec.to_host(on_device(np.zeros(4, np.uint32), "float32")),
        Deadline(30.0),
    )
    with pytest.raises(ValueError, match=r"x holds uint32\[4\], not uint16\[4\]"):
        codec.read(
            [tmp_path / "full"], like(on_device(np.zeros(4, np.uint16), "bfloat16")), Deadline(30.0)
        )
