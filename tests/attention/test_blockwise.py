"""Dense attention in blocks laid out keys by queries equals the naive definition, in values and
gradients.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.blockwise import block_size, blockwise_attention, dense_attention, mean_trips
from pallas_kernels.tokens import Tokens
from planner.flops import matmul_flops
from tests.attention.rows import (
    Piece,
    defined,
    documents,
    normal,
    pack,
    relative,
    results,
    separate,
)

ROWS = {
    "single": separate([317], 317),  # long enough for blocks that are taken together
    "packed": pack([Piece(9), Piece(20, (7, 1, 12)), Piece(5, (3,))], 64)[0],
    # of the length of the packed row, with which it shares programs
    "documents": documents([9, 0, 17, 8], 6, block=4, prefix=3).map(
        lambda x: np.pad(x, ((0, 0), (0, 64 - x.shape[1])))
    ),
}


@functools.cache
def program(window: int | None, block: int):
    """A function of (q, k, v, their tokens, weights): results and gradients."""

    @jax.jit
    def run(q, k, v, q_tokens, k_tokens, weights):
        def ours(q, k, v):
            return blockwise_attention(q, k, v, q_tokens, k_tokens, window, block)

        return results(ours, (q, k, v), *weights)

    return run


def inputs(tokens: Tokens, queries: int, heads=4, kv_heads=2, size=8, dtype=jnp.float64):
    (batch, length) = tokens.shape
    keys = (*tokens.shape, kv_heads, size)
    q, k, v = normal(0, (batch, length, heads, size), keys, keys, dtype=dtype)
    q = np.asarray(q)[:, -queries:]
    return (q, k, v), tokens.map(lambda x: np.asarray(x)[:, -queries:])


@pytest.mark.parametrize(  # every pair of two values
    "block, queries, kind, window",
    [
        (block, queries, kind, (None, 1, 7)[(row + column) % 3])
        for row, (block, queries) in enumerate([(8, 64), (64, 30), (16, 5)])
        for column, kind in enumerate(ROWS)
    ],
)
@pytest.mark.quick(first=1)  # other kinds, windows and blocks: test_dense
def test_values_and_gradients_equal_the_definition(x64, kind, window, block, queries):
    tokens = ROWS[kind]
    qkv, asking = inputs(tokens, queries)
    weights = normal(1, qkv[0].shape, qkv[0].shape[:3], dtype=jnp.float64)

    (out, lse), gradients = program(window, block)(*qkv, asking, tokens, weights)
    (expected, expected_lse), wanted = defined(qkv, *weights, asking, tokens, window)
    assert relative(out, expected) < 1e-12
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients, wanted, strict=True):
        assert relative(one, other) < 1e-12


@pytest.mark.parametrize(
    "heads, kv_heads, dtype",
    [
        (6, 2, "bfloat16"),
        (1, 1, "float32"),
        (3, 1, "float32"),
    ],
)
@pytest.mark.long
def test_group_sizes_and_precision_are_those_of_all_scores_in_memory(heads, kv_heads, dtype):
    tokens = ROWS["packed"]
    qkv, _ = inputs(tokens, 64, heads, kv_heads, dtype=dtype)

    def gradient(function):
        return jax.jit(
            jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x)[0].astype(jnp.float32))), (0, 1, 2))
        )(*qkv)

    ours = gradient(lambda *x: blockwise_attention(*x, tokens, tokens, None, 16))
    theirs = gradient(lambda *x: dense_attention(*x, tokens, tokens))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and relative(one, other) < (
            1e-5 if dtype == "float32" else 1e-2
        )


@pytest.mark.parametrize("block", [16, pytest.param(128, marks=pytest.mark.long)])
def test_mean_trips_count_the_products_that_are_made(block):
    tokens = ROWS["single"]
    qkv, _ = inputs(tokens, 317, dtype=jnp.float32)
    hlo = (
        jax.jit(lambda *x: blockwise_attention(*x, tokens, tokens, None, block))
        .lower(*qkv)
        .compile()
        .as_text()
    )
    blocks = -(-317 // block)
    made = blocks * (blocks + 1) / 2 * block**2
    assert matmul_flops(hlo, mean_trips(tokens, None, block)) == pytest.approx(2 * 2 * 4 * 8 * made)


def test_short_rows_have_small_blocks():
    assert (
        block_size(1000, None) == 64
        and block_size(4096, None) == 256
        and block_size(4096, 512) == 64
    )
