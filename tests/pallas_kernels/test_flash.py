"""The flash kernels equal the definition in float64, in values and gradients, whatever the masks
and group sizes.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash import reference
from pallas_kernels.flash.api import flash_attention
from pallas_kernels.flash.blocks import TuningConfig, visits
from pallas_kernels.padding import pad
from pallas_kernels.tokens import Tokens, sequences, visible
from tests.attention.rows import Piece, documents, pack
from tests.pallas_kernels.judge import (
    defined,
    judge,
    masked_places_may_hold_anything,
    normal,
    not_finite_reaches_only_those_who_see_it,
)

PIECES = [Piece(9), Piece(20, (7, 1, 12)), Piece(5, (3,))]
TPU = {
    "implementation": "tpu",
    "interpret": pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
    "tuning": TuningConfig(
        block_q=16, block_kv=24, block_q_dq=24, block_kv_dq=16, block_q_dkv=16, block_kv_dkv=24
    ),
}
# tiles of 64 are what a warpgroup multiplies
GPU = {
    "implementation": "gpu",
    "interpret": plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
    "tuning": TuningConfig(
        128, block_kv=64, block_q_dq=128, block_kv_dq=64, block_q_dkv=64, block_kv_dkv=128
    ),
}


REFERENCE = {"implementation": "reference"}
KERNELS = {"reference": REFERENCE, "tpu": TPU, "gpu": GPU}
jit_visible = jax.jit(visible, static_argnums=2)  # one program instead of many small ones


@functools.cache
def rows(kind: str, scale: int = 1) -> tuple[Tokens, Tokens]:
    """Tokens of the queries and of the keys, ``scale`` times as long."""
    # 13 new tokens after 30 in the cache, and a row whose queries see nothing
    if kind == "prefill":
        keys = sequences(jnp.array([43, 0]) * scale, 50 * scale)
        slots = jnp.zeros((2, 1), jnp.int32) + jnp.arange(13 * scale, dtype=jnp.int32)
        ones = jnp.ones_like(slots)
        zeros = jnp.zeros_like(slots)
        return Tokens(
            segments=ones, branches=zeros, documents=zeros, order=slots + 30 * scale
        ), keys
    if kind == "packed":
        tokens = pack(
            [Piece(x.prompt * scale, tuple(y * scale for y in x.completions)) for x in PIECES],
            64 * scale,
        )[0]
    elif kind == "documents":
        tokens = documents([x * scale for x in (9, 0, 17, 8)], 6 * scale, block=4, prefix=3 * scale)
    else:
        tokens = sequences(jnp.array([40, 37]) * scale, 40 * scale)
    return tokens, tokens


def inputs(q_tokens: Tokens, k_tokens: Tokens, heads=4, kv_heads=2, size=8, dtype=jnp.float64):
    (batch, queries) = q_tokens.shape
    keys = k_tokens.shape[1]
    return normal(
        0, (batch, queries, heads, size), *[(batch, keys, kv_heads, size)] * 2, dtype=dtype
    )


def check(tokens, heads=4, kv_heads=2, size=8, window=None, dtype=jnp.float32, **options):
    """Values and gradients against the definition."""
    given = {"q_tokens": tokens[0], "k_tokens": tokens[1], "window": window}
    naive = functools.partial(reference.attention, **given)
    kernel = functools.partial(flash_attention, **given, **options)
    mask = np.asarray(jit_visible(*tokens, window))[:, :, None]
    definition = functools.partial(defined, mask=mask)
    judge(kernel, definition, inputs(*tokens, heads, kv_heads, size), dtype, naive=naive)


def test_the_reference_equals_the_definition_in_values_and_gradients(x64):
    check(rows("prefill"), 4, 2, window=25, dtype=jnp.float64, **REFERENCE)


@pytest.mark.parametrize(
    "kind, window, heads, kv_heads",
    [("single", 7, 3, 1), ("packed", None, 4, 2), ("prefill", 25, 1, 1)],
)
@pytest.mark.quick(first=1)
def test_tpu_equals_the_definition_in_values_and_gradients(x64, kind, window, heads, kv_heads):
    check(rows(kind), heads, kv_heads, window=window, **TPU)


@pytest.mark.long
def test_tpu_fetches_into_no_slot_that_is_in_use(x64):
    # a copy that is made as it is started overwrites what is still needed, which one made when
    # awaited does not
    eager = dataclasses.replace(TPU["interpret"], dma_execution_mode="eager")
    check(rows("documents"), 16, 1, **TPU | {"interpret": eager})


@pytest.mark.long
def test_tpu_in_bfloat16_is_no_worse_than_the_definition_in_bfloat16(x64):
    check(rows("packed"), size=32, dtype=jnp.bfloat16, **TPU)


# the interpreter has no wgmma accumulators beside shared memory: its products are jnp's, all else
# is as on the device
@pytest.mark.parametrize(
    "unit, kind, scale, window, heads, kv_heads, size",
    [
        ("wgmma", "packed", 3, None, 2, 1, 16),
        # sums of 128 columns, which pass through registers in two parts
        ("tcgen05", "prefill", 4, 70, 3, 1, 72),
    ],
)
@pytest.mark.long
def test_gpu_equals_the_definition_in_bfloat16_in_values_and_gradients(
    x64, unit, kind, scale, window, heads, kv_heads, size
):
    tuning = dataclasses.replace(GPU["tuning"], matrix_unit=unit)
    check(
        rows(kind, scale),
        heads,
        kv_heads,
        size=size,
        window=window,
        dtype=jnp.bfloat16,
        **GPU | {"tuning": tuning},
    )


@functools.cache
def packed(kind: str):
    """(a kernel of a packed row, its inputs), the same for all tests."""
    tokens, _ = rows("packed")
    options = KERNELS[kind]
    if kind == "tpu":  # fewer steps, each with more tokens beside a bad one
        options = options | {"tuning": TuningConfig(32, 32, 32, 32, 32, 32)}
    function = functools.partial(flash_attention, q_tokens=tokens, k_tokens=tokens, **options)
    dtype = jnp.bfloat16 if kind == "gpu" else jnp.float32
    return function, inputs(tokens, tokens, heads=2, kv_heads=1, size=16, dtype=dtype)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.quick(first=1)
def test_padding_may_hold_anything(kind):
    real = np.asarray(rows("packed")[0].segments) > 0
    assert not real.all()
    masked_places_may_hold_anything(*packed(kind), [real] * 3)


@pytest.mark.parametrize("kind, turn", [("reference", None), ("tpu", 0), ("gpu", 1)])
@pytest.mark.quick(first=1)
def test_values_that_are_not_finite_reach_only_those_who_see_them(kind, turn):
    seen = jit_visible(*rows("packed"))
    # both in the middle of the second sequence
    not_finite_reaches_only_those_who_see_it(*packed(kind), seen, 20, 20, turn)


@pytest.mark.long
def test_tpu_does_not_read_blocks_that_are_not_seen():
    tokens, _ = rows("single")
    q, k, v = inputs(tokens, tokens, dtype=jnp.float32)
    attend = jax.jit(lambda *x: flash_attention(*x, tokens, tokens, **TPU))
    clean = jax.device_get(attend(q, k, v))
    for x in (k, v):
        x[:, TPU["tuning"].block_kv :] = np.nan
    for found, expected in zip(jax.device_get(attend(q, k, v)), clean, strict=True):
        assert np.array_equal(
            found[:, : TPU["tuning"].block_q], expected[:, : TPU["tuning"].block_q]
        )
        assert np.isnan(found[:, TPU["tuning"].block_kv :]).any()


@pytest.mark.parametrize(
    "kind, window", [("single", 12), ("packed", None), ("documents", 12), ("prefill", None)]
)
def test_lists_hold_all_that_is_seen_and_masks_all_that_is_not(kind, window):
    @jax.jit
    def found(q, k):
        tokens = [x.map(lambda y: pad(y, 4)) for x in (q, k)]
        return visible(*tokens, window), visits(*tokens, 4, 4, window)

    mask, lists = jax.device_get(found(*rows(kind)))
    pairs = mask.reshape(mask.shape[0], mask.shape[1] // 4, 4, mask.shape[2] // 4, 4)
    some = pairs.any(axis=(2, 4))
    every = pairs.all(axis=(2, 4))
    for found, axes in zip(lists, ((0, 1, 2), (0, 2, 1)), strict=True):
        for one, seen, whole in zip(
            found.reshape(-1, found.shape[2]),
            some.transpose(axes).reshape(-1, found.shape[2] - 2),
            every.transpose(axes).reshape(-1, found.shape[2] - 2),
            strict=True,
        ):
            count = one[0]
            unmasked = one[1]
            listed = one[2 : 2 + one[0]]
            assert len(set(listed)) == count and set(np.flatnonzero(seen)) <= set(listed)
            assert set(listed[:unmasked]) <= set(np.flatnonzero(whole))
    if kind == "single":
        assert lists[0][..., 1].max() > 0  # blocks without a mask do occur


def test_without_an_accelerator_the_definition_is_chosen(x64):
    tokens = rows("packed")
    qkv = inputs(*tokens)
    ours, theirs = (
        jax.jit(function)(*qkv, *tokens) for function in (flash_attention, reference.attention)
    )
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == jnp.float64 and np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "triton"}, "implementation='triton' must be one of"),
        ({"implementation": "tpu"}, "backend='cpu' is not 'tpu', and interpret=False"),
        ({"implementation": "gpu"}, "backend='cpu' is not 'gpu', and interpret=False"),
        ({"interpret": TPU["interpret"]}, "needs a named implementation, not implementation=None"),
        ({"heads": 3}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"heads": 34, **TPU}, "17 query heads share a key/value head"),
    ],
)
def test_what_cannot_run_is_refused_with_its_values(options, message):
    tokens = rows("single")
    heads = options.get("heads", 4)
    q, k, v = inputs(*tokens, heads, dtype=jnp.float32)
    with pytest.raises(ValueError, match=message):
        flash_attention(
            q, k, v, *tokens, **{name: x for name, x in options.items() if name != "heads"}
        )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_q": 64}, "block_q=64 must be 128 for wgmma"),
        ({"block_q_dkv": 96}, "block_q_dkv=96 must be a multiple of 64"),
        ({"steps": 0}, "steps=0 must be positive"),
    ],
)
def test_block_sizes_that_do_not_fit_the_matrix_unit_are_refused(sizes, message):
    tokens = rows("single")
    qkv = [x.astype(jnp.bfloat16) for x in inputs(*tokens, dtype=jnp.float32)]
    with pytest.raises(ValueError, match=message):
        tuning = dataclasses.replace(GPU["tuning"], **sizes)
        jax.eval_shape(
            jax.grad(
                lambda *x: (
                    flash_attention(*x, *tokens, **GPU | {"tuning": tuning})[0].sum().astype(float)
                )
            ),
            *qkv,
        )


def test_values_of_another_dtype_are_refused():
    tokens = rows("single")
    q, k, v = inputs(*tokens, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"the dtypes \['bfloat16', 'float32'\] must be one of"):
        flash_attention(q, k, v.astype(jnp.bfloat16), *tokens, **TPU)
