"""NSA's branches and its selection equal the definition, alone and in packed rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import reference
from attention.blocks import Blocks, aligned, entries, in_place
from attention.blockwise import dense_attention
from attention.compressed import block_scores, compressed_attention
from attention.methods.nsa import NSA, compress, nsa_attention
from pallas_kernels.tokens import Tokens
from tests.attention.rows import normal, relative, separate

SMALL = NSA(length=8, stride=4, block=16, picks=3, initial=1, local=1, window=10)
HEADS, KV_HEADS, SIZE, HIDDEN = 4, 2, 8, 6


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a layer hands to NSA, before anything is placed in blocks: q [B, T, N, H], keys and
    values [B, T, K, H].
    """

    q: jax.Array
    compressed: tuple[jax.Array, jax.Array]
    selected: tuple[jax.Array, jax.Array]
    window: tuple[jax.Array, jax.Array]
    gates: jax.Array

    def at(self, slots: np.ndarray) -> Inputs:
        return jax.tree.map(lambda x: x[:, slots], self)


jax.tree_util.register_dataclass(Inputs)


def inputs(
    length: int, dtype=jnp.float32, heads: int = HEADS, kv_heads: int = KV_HEADS, seed=0
) -> Inputs:
    kv = [(1, length, kv_heads, SIZE)] * 6
    q, *rest, gates = normal(
        seed, (1, length, heads, SIZE), *kv, (1, length, heads, 3), dtype=dtype
    )
    return Inputs(q, tuple(rest[:2]), tuple(rest[2:4]), tuple(rest[4:]), sigmoid(gates))


def weights(config: NSA, dtype=jnp.float32, seed=9):
    """The MLPs of keys and of values."""
    shapes = [(config.length, SIZE), (config.length, SIZE, HIDDEN), (HIDDEN, SIZE)]
    values = normal(seed, *shapes, *shapes, dtype=dtype)
    return tuple(values[:3]), tuple(values[3:])


sigmoid = jax.jit(jax.nn.sigmoid)


@functools.partial(jax.jit, static_argnames="config")
def ours(x: Inputs, phi, tokens: Tokens, blocks: Blocks, config: NSA):
    stretched = entries(blocks, config.length, config.stride)
    compressed = tuple(
        compress(blocks.place(y), *mlp, config) for y, mlp in zip(x.compressed, phi, strict=True)
    )
    selected = tuple(blocks.place(y) for y in x.selected)
    window, _ = dense_attention(x.q, *x.window, tokens, tokens, window=config.window)
    return nsa_attention(
        x.q, compressed, selected, window, x.gates, tokens, blocks, stretched, config
    )


@functools.partial(jax.jit, static_argnames="config")
def theirs(x: Inputs, phi, config: NSA):
    alone = jax.tree.map(lambda y: y[0], x)
    compressed = tuple(
        reference.compress(y, *mlp, config) for y, mlp in zip(alone.compressed, phi, strict=True)
    )
    return reference.nsa(alone.q, compressed, alone.selected, alone.window, alone.gates, config)[
        None
    ]


placed = jax.jit(in_place, static_argnums=1)


def single(length: int, config: NSA) -> tuple[Tokens, Blocks]:
    tokens = separate([length], length)
    return tokens, placed(tokens, config.block)


CONFIGS = [
    SMALL,
    NSA(length=8, stride=8, block=8, picks=2, initial=0, local=1, window=1),
    NSA(length=4, stride=2, block=16, picks=4, initial=1, local=2, window=100),
    NSA(length=16, stride=4, block=16, picks=100, initial=2, local=2, window=5),
]


@pytest.mark.long
@pytest.mark.parametrize("config", CONFIGS[1:])  # SMALL is in test_methods
def test_values_and_gradients_equal_the_definition(x64, config):
    length = 97
    wide = inputs(length, jnp.float64)
    phi = weights(config, jnp.float64)
    tokens, blocks = single(length, config)
    (weight,) = normal(5, wide.q.shape, dtype=jnp.float64)

    def loss(function, x, phi):
        out = function(x, phi)
        return jnp.sum(out * weight), out

    def gradient(function, x, phi):
        return jax.grad(lambda x, phi: loss(function, x, phi), (0, 1), has_aux=True)(x, phi)

    wanted, expected = jax.jit(lambda x, phi: gradient(lambda x, p: theirs(x, p, config), x, phi))(
        wide, phi
    )
    found, out = jax.jit(
        lambda x, phi: gradient(lambda x, p: ours(x, p, tokens, blocks, config), x, phi)
    )(wide, phi)
    assert relative(out, expected) < 1e-12  # float64: the same blocks are chosen
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("heads, kv_heads", [(16, 1), (3, 3)])
def test_group_sizes(x64, heads, kv_heads):
    x = inputs(60, jnp.float64, heads, kv_heads)
    phi = weights(SMALL, jnp.float64)
    assert relative(ours(x, phi, *single(60, SMALL), SMALL), theirs(x, phi, SMALL)) < 1e-12


def test_weights_of_stretches_in_a_block():
    config = NSA(length=32, stride=16, block=64)
    probabilities = np.eye(16, dtype=np.float32)[None, None]  # query e sees stretch e alone
    found = jax.jit(lambda x: block_scores(x, None, config))(probabilities)
    scores = np.asarray(found)[0, :, 0]
    # stretch e holds tokens 16 e ... 16 e + 31; its weight in block j is the tokens they share, by
    # 16
    shared = [
        [
            len(set(range(16 * e, 16 * e + 32)) & set(range(64 * j, 64 * j + 64))) / 16
            for j in range(4)
        ]
        for e in range(16)
    ]
    assert np.array_equal(scores, shared)
    assert list(scores[3:8, 1]) == [1, 2, 2, 2, 1]


@pytest.mark.long
def test_a_query_that_sees_no_stretch_gets_nothing_from_it():
    tokens, blocks = single(7, SMALL)
    x = inputs(7)
    phi = weights(SMALL)

    def compressed(x, phi):
        stretched = entries(blocks, SMALL.length, SMALL.stride)
        keys = (
            compress(blocks.place(y), *mlp, SMALL) for y, mlp in zip(x.compressed, phi, strict=True)
        )
        return compressed_attention(x.q, *keys, tokens, blocks, stretched, SMALL)[0]

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def gradients(x, phi):
        out = compressed(x, phi)
        return jnp.sum(out**2 + out), out

    found, out = gradients(x, phi)
    assert not np.any(out)
    for gradient in jax.tree.leaves(found):
        assert not np.any(gradient)


@pytest.mark.long
def test_all_blocks_chosen_is_dense_attention():
    config = dataclasses.replace(SMALL, picks=100)
    tokens, blocks = single(90, config)
    x = inputs(90)
    phi = weights(config)
    x = dataclasses.replace(x, gates=np.tile(np.float32([0, 1, 0]), (*x.gates.shape[:3], 1)))
    expected = jax.jit(reference.dense)(*(np.asarray(y)[0] for y in (x.q, *x.selected)))
    assert relative(np.asarray(ours(x, phi, tokens, blocks, config))[0], expected) < 1e-5


def test_rows_already_in_place_are_aligned_where_they_are():
    tokens = separate([50], 50)
    slots = np.asarray(jax.jit(lambda tokens: aligned(tokens, 16, runs=1).slots)(tokens))
    assert np.array_equal(slots[0, :50], np.arange(50)) and not np.any(slots[0, 50:] >= 0)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(length=30), "stride=16 must divide length=30 and block=64"),
        (dict(length=128), "length=128 must not exceed block=64"),
        (dict(picks=2), r"initial=1 \+ local=2 blocks must fit in picks=2"),
        (dict(local=0), "local=0 must be at least 1"),
        (dict(window=0), "window=0 must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NSA(**settings)
