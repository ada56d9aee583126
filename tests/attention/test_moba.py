"""MoBA equals its definition, alone and in packed rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import reference
from attention.blocks import in_place
from attention.methods.moba import MoBA, moba_attention
from tests.attention.rows import normal, relative, separate

SMALL = MoBA(block=16, picks=2)


def inputs(length, dtype=jnp.float32, heads=4, kv_heads=2):
    return normal(
        0, (1, length, heads, 8), (1, length, kv_heads, 8), (1, length, kv_heads, 8), dtype=dtype
    )


@functools.partial(jax.jit, static_argnames="config")
def ours(q, k, v, tokens, blocks, config):
    return moba_attention(q, blocks.place(k), blocks.place(v), tokens, blocks, config)[0]


placed = jax.jit(in_place, static_argnums=1)


def single(length, config):
    tokens = separate([length], length)
    return tokens, placed(tokens, config.block)


@pytest.mark.long
@pytest.mark.parametrize(
    "heads, kv_heads, length, config",
    [  # more of SMALL in test_methods
        (3, 3, 45, MoBA(block=8, picks=5)),
        (16, 1, 45, MoBA(block=8, picks=1)),
        (4, 2, 1, SMALL),
    ],
)
def test_values_and_gradients_equal_the_definition(x64, config, length, heads, kv_heads):
    x = inputs(length, jnp.float64, heads, kv_heads)
    (weight,) = normal(5, x[0].shape, dtype=jnp.float64)

    def loss(*x):
        out = ours(*x, *single(length, config), config)
        return jnp.sum(out * weight), out

    def expected(*x):
        out = reference.moba(*(y[0] for y in x), config)[None]
        return jnp.sum(out * weight), out

    found, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*x)
    wanted, theirs = jax.jit(jax.grad(expected, (0, 1, 2), has_aux=True))(*x)
    assert relative(out, theirs) < 1e-12
    for a, b in zip(found, wanted, strict=True):
        assert np.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_all_blocks_chosen_is_dense_attention():
    x = inputs(90)
    config = MoBA(block=16, picks=100)
    expected = jax.jit(reference.dense)(*(np.asarray(y)[0] for y in x))
    assert relative(np.asarray(ours(*x, *single(90, config), config))[0], expected) < 1e-5


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="block=0 and picks=3 must be at least 1"):
        MoBA(block=0)
