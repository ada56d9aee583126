"""Every attention call says which implementation it takes on every target, and why not a kernel."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attention.implementations import PHASES, CallShape, implementations
from attention.methods.api import METHODS
from attention.methods.dense import Dense
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.window import Window
from launch.targets import TARGETS
from pallas_kernels import choice
from pallas_kernels.flash.api import obstacle as flash_obstacle
from pallas_kernels.paged.api import _obstacle as paged_obstacle

SHAPE = CallShape(
    num_heads=16,
    num_kv_heads=2,
    head_dim=128,
    train_rows=1,
    train_tokens=8192,
    prefill_rows=2,
    prefill_tokens=256,
    decode_rows=8,
    page=64,
    pages=128,
)
SMALL = {"window": Window(512), "nsa": NSA(), "moba": MoBA(block=64)}
PLATFORMS = ["cpu", *sorted({target.kind for target in TARGETS.values()})]


def method(name):
    return SMALL.get(name) or METHODS[name]()


def found(method, platform, dtype="bfloat16", **changes):
    shape = dataclasses.replace(SHAPE, **changes)
    rows = implementations([method], shape, dtype, platform)
    return {(row.part, row.phase): (row.implementation, row.reason) for row in rows}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_row_for_every_phase_on_every_target(name, platform):
    rows = implementations([method(name)] * 3, SHAPE, "bfloat16", platform)
    assert {row.phase for row in rows} == set(PHASES)
    assert {row.layers for row in rows} == {3}
    assert all((row.implementation == "xla") == bool(row.reason) for row in rows)
    if platform == "cpu":
        assert {row.reason for row in rows} == {"no kernel for cpu"}
    else:
        kernel = "tpu" if platform == "tpu" else "gpu"
        assert (rows[0].implementation, rows[0].phase) == (kernel, "train"), str(rows[0])


def test_what_falls_back_says_why():
    hopper = found(Dense(), "hopper", "float32")
    assert hopper["all keys", "train"] == (
        "xla",
        "the dtypes ['float32'] must be one of ('bfloat16',)",
    )
    assert found(Dense(), "tpu", "float32")["all keys", "train"] == ("tpu", "")
    wide = found(Dense(), "blackwell", head_dim=256)
    assert wide["all keys", "prefill"] == ("xla", "head size 256 is more than 128")
    small = found(MoBA(block=32), "hopper")
    assert small["chosen blocks", "train"] == ("xla", "size=32 must be a multiple of 64")
    short = found(Dense(), "hopper", train_tokens=1024)
    assert short["all keys", "train"] == (
        "xla",
        "rows of 1024 keys keep all their scores, being short",
    )
    assert found(NSA(), "tpu")["compressed", "decode"][1].startswith("few queries take one step")
    assert found(NSA(), "tpu")["compressed", "prefill"] == ("tpu", "")


def test_the_rows_agree_with_what_the_calls_themselves_say():
    """For interpreted kernels, which run here as on their device but for the platform."""
    for dtype in ("float32", "bfloat16"):
        for head_dim in (64, 128, 256):
            shape = dataclasses.replace(SHAPE, head_dim=head_dim)
            rows = found(Dense(), "hopper", dtype, head_dim=head_dim)
            q, k = (
                jax.ShapeDtypeStruct(x, jnp.dtype(dtype))
                for x in (shape.queries("prefill"), shape.keys("prefill"))
            )
            assert rows["all keys", "prefill"][1] == (flash_obstacle("gpu", q, k, k, True) or "")
            pages = jax.ShapeDtypeStruct((1024, 2, shape.page, head_dim), jnp.dtype(dtype))
            q = jax.ShapeDtypeStruct(shape.queries("decode"), jnp.dtype(dtype))
            said = paged_obstacle("gpu", q, pages, pages, True) or ""
            assert rows["all keys", "decode"][1] == said


def test_the_platform_at_hand_is_the_default():
    assert choice.here() == "cpu"
    assert implementations([Dense()], SHAPE, "float32") == implementations(
        [Dense()], SHAPE, "float32", "cpu"
    )
