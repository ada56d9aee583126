"""Every attention call says which implementation it takes on every target, and why not a kernel."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attention.calls import PHASES, CallShape
from attention.implementations import implementations
from attention.layout import lay_out
from attention.methods.api import METHODS
from attention.methods.dense import Dense
from attention.methods.dsa import DSA
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.window import Window
from models.sharding import MeshConfig, abstract_mesh, use_mesh
from pallas_kernels import choice
from pallas_kernels.flash.api import obstacle as flash_obstacle
from pallas_kernels.paged.api import _obstacle as paged_obstacle
from pallas_kernels.tokens import sequences
from planner.targets import TARGETS

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
    if not method(name).calls(SHAPE):
        assert {row.reason for row in rows} == {"the method asks for no kernel"}
    elif platform == "cpu":
        assert {row.reason for row in rows} == {"no kernel for cpu"}
    else:
        kernel = "tpu" if platform == "tpu" else "gpu"
        if name == "mla" and kernel == "gpu":
            # the plain and the rotated part of a key together
            assert rows[0].reason == "head size 256 is more than 128"
            decode = [(row.implementation, row.reason) for row in rows if row.phase == "decode"]
            other = ("xla", "no kernel for this GPU")
            assert decode == [("gpu", "") if platform == "hopper" else other]
            return
        if name == "gated_delta":
            decode = {row.reason for row in rows if row.phase == "decode"}
            assert decode == {"one token multiplies no matrices"}
            if platform == "blackwell":
                assert rows[0].reason == "no kernel for Blackwell"
                return
        if name == "dsa":
            assert {row.reason for row in rows if row.part == "chosen keys"} == {
                "kernels read blocks of keys, and here each query has single keys of its own"
            }
            # a chunk of a prompt of few keys is as without an indexer
            short = implementations([DSA(picks=8192)], SHAPE, "bfloat16", platform)
            assert {row.part for row in short} == {"all keys"}
            return
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
    short = {train: found(Dense(), train, train_tokens=128) for train in ("cpu", "hopper", "tpu")}
    assert short["cpu"]["all keys", "train"] == ("xla", "no kernel for cpu")
    assert short["hopper"]["all keys", "train"] == ("gpu", "")
    assert short["tpu"]["all keys", "train"] == ("tpu", "")
    for phase in ("prefill", "decode"):
        assert found(NSA(), "tpu")["compressed", phase] == ("tpu", "")
    wide = found(NSA(stride=4, length=8), "hopper", page=2048)
    assert wide["compressed", "decode"][1] == "512 stretches of a page must divide 128"


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


@pytest.mark.parametrize("target", ["v5p", "h100"])
@pytest.mark.parametrize("method", [Dense(), Window(16)], ids=str)
@pytest.mark.quick(each=True)
def test_short_rows_keep_no_scores_on_an_accelerator(method, target):
    def loss(q, k, v):
        layout = lay_out((method,), sequences(jnp.array([100]), 128))
        return jnp.sum(method.attend(q, {"main": (k, v)}, layout, None).astype(jnp.float32))

    heads = [jax.ShapeDtypeStruct((1, 128, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    with use_mesh(abstract_mesh(MeshConfig(1, 1), TARGETS[target].device)):
        found = str(jax.jit(jax.grad(loss)).trace(*heads).jaxpr)
    kernels = {"v5p": "flash_forward", "h100": "mpmd_map"}
    assert kernels[target] in found and "4,128,128" not in found
