"""Blockwise dense attention equals the naive definition, in values and gradients, whatever the
masks.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import reference
from attention.blockwise import dense_attention
from pallas_kernels.softmax import merge
from pallas_kernels.tokens import Tokens, bounds, may_see, visible
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

PIECES = [Piece(9), Piece(20, (7, 1, 12)), Piece(5, (3,))]


def single(length: int) -> Tokens:
    return separate([length], length)


LENGTH = 61  # of every row, so that they share programs; not a multiple of a block


def rows(kind: str) -> Tokens:
    """Tokens of one row."""
    if kind == "single":
        return single(LENGTH)
    if kind == "packed":
        return pack(PIECES, LENGTH)[0]
    gaps = documents([9, 0, 17, 8], 6, block=4, prefix=3)
    return gaps.map(lambda x: np.pad(x, ((0, 0), (0, LENGTH - x.shape[1]))))


@functools.partial(jax.jit, static_argnames="window")
def naive(q, k, v, q_tokens, k_tokens, window=None):
    """The reference under the rule's own mask, row by row."""
    mask = visible(q_tokens, k_tokens, window)
    return jax.vmap(lambda q, k, v, m: reference.attention(q, k, v, m[None])[:2])(q, k, v, mask)


@functools.cache
def compiled(**options):
    """``dense_attention`` of (q, k, v, their tokens) with these options, as one program."""
    return jax.jit(functools.partial(dense_attention, **options))


@functools.cache
def with_gradients(window: int | None, block: int | None):
    """A function of (q, k, v, their tokens, weights): results and gradients."""

    @jax.jit
    def run(q, k, v, tokens, weights):
        def ours(q, k, v):
            return dense_attention(q, k, v, tokens, tokens, window=window, block=block)

        return results(ours, (q, k, v), *weights)

    return run


def inputs(tokens: Tokens, heads=4, kv_heads=2, size=8, dtype=jnp.float32, seed=0):
    batch, length = tokens.shape
    return normal(
        seed, (batch, length, heads, size), *[(batch, length, kv_heads, size)] * 2, dtype=dtype
    )


@pytest.mark.parametrize("kind", ["single", "packed", "documents"])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("block", [None, 16])  # more of them in test_blockwise, in float64
@pytest.mark.quick(each=True)
def test_values_and_gradients_equal_the_definition(x64, kind, window, block):
    tokens = rows(kind)
    wide = inputs(tokens, dtype=jnp.float64)
    narrow = [x.astype(jnp.float32) for x in wide]
    weights = normal(1, wide[0].shape, wide[0].shape[:3], dtype=jnp.float64)

    (out, lse), gradients = with_gradients(window, block)(*narrow, tokens, weights)
    (expected, expected_lse), wanted = defined(wide, *weights, tokens, tokens, window)
    assert relative(out, expected) < 1e-5
    finite = np.isfinite(expected_lse)
    assert np.array_equal(np.isfinite(lse), finite)
    assert np.abs(np.asarray(lse)[finite] - np.asarray(expected_lse)[finite]).max() < 1e-4
    for found, want in zip(gradients, wanted, strict=True):
        assert relative(found, want) < 1e-4


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("heads, kv_heads", [(3, 1), (16, 1)])  # more in test_blockwise
def test_group_sizes(x64, heads, kv_heads):
    tokens = rows("single")
    wide = inputs(tokens, heads, kv_heads, dtype=jnp.float64)
    out, _ = compiled(block=16)(*(x.astype(jnp.float32) for x in wide), tokens, tokens)
    assert relative(out, naive(*wide, tokens, tokens)[0]) < 1e-5


@pytest.mark.long
def test_bfloat16_is_no_worse_than_the_definition_in_bfloat16(x64):
    tokens = rows("packed")
    wide = inputs(tokens, size=32, dtype=jnp.float64)
    narrow = [x.astype(jnp.bfloat16) for x in wide]
    (weight,) = normal(3, wide[0].shape, dtype=jnp.float64)

    def computed(function, x):
        """(gradients, result)."""

        def total(*x):
            out = function(*x)
            return jnp.sum(out * weight), out

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*x)

    def ours(q, k, v):
        return compiled(block=16)(q, k, v, tokens, tokens)[0]

    def theirs(q, k, v):
        return naive(q, k, v, tokens, tokens)[0]

    wanted, expected = computed(theirs, wide)
    gradients, out = computed(theirs, narrow)
    naive_errors = [relative(a, b) for a, b in zip(gradients, wanted, strict=True)]
    most_error = min(5e-3, 2 * relative(out, expected))
    for function in (ours, lambda q, k, v: dense_attention(q, k, v, tokens, tokens)[0]):
        gradients, out = computed(function, narrow)
        assert relative(out, expected) < most_error
        for found, want, most in zip(gradients, wanted, naive_errors, strict=True):
            assert relative(found, want) < min(1e-2, 2 * most)


@pytest.mark.long
def test_packed_sequences_equal_the_sequences_apart():
    tokens, slots = pack(PIECES, LENGTH)
    qkv = [np.asarray(x) for x in inputs(tokens)]
    for window, block in itertools.product((None, 5), (None, 16)):
        attend = compiled(window=window, block=block)
        out, _ = attend(*qkv, tokens, tokens)
        for at in slots:  # in rows of one length, which are compiled once
            row = separate([len(at)], LENGTH)
            padding = ((0, 0), (0, LENGTH - len(at)), (0, 0), (0, 0))
            alone = (np.pad(x[:, at], padding) for x in qkv)
            expected, _ = attend(*alone, row, row)
            assert relative(np.asarray(out)[:, at], np.asarray(expected)[:, : len(at)]) < 1e-6


@jax.jit
def seen(tokens: Tokens):
    return visible(tokens, tokens)


@functools.partial(jax.jit, static_argnums=1)
def may_read(tokens: Tokens, size: int):
    return may_see(bounds(tokens, size), bounds(tokens, size))


def holding(x: jax.Array, at: int | slice, value: float) -> np.ndarray:
    """x with a value in some keys of the first row."""
    x = np.array(x)
    x[0, at] = value
    return x


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("kind", ["single", "packed", "documents"])
def test_what_is_not_seen_changes_no_bit(block, kind):
    tokens = rows(kind)
    q, k, v = inputs(tokens)
    mask = np.asarray(seen(tokens))[0]
    attend = compiled(block=block)
    clean = attend(q, k, v, tokens, tokens)
    for key in (0, 13, 30, 47):
        poisoned = attend(q, *(holding(x, key, 1e4) for x in (k, v)), tokens, tokens)
        for found, expected in zip(poisoned, clean, strict=True):
            found, expected = np.asarray(found), np.asarray(expected)
            assert np.array_equal(found[0, ~mask[:, key]], expected[0, ~mask[:, key]])


@pytest.mark.parametrize("kind", ["single", "packed", "documents"])
def test_blocks_that_are_not_seen_are_not_read(kind):
    tokens = rows(kind)
    size = 16
    q, k, v = inputs(tokens)
    attend = compiled(block=size)
    clean = attend(q, k, v, tokens, tokens)
    padded = tokens.map(lambda x: np.pad(x, ((0, 0), (0, -x.shape[1] % size))))
    read = np.asarray(may_read(padded, size))[0]
    assert not read.all()
    for key_block in range(read.shape[1]):
        at = slice(key_block * size, (key_block + 1) * size)
        poisoned = attend(q, *(holding(x, at, np.nan) for x in (k, v)), tokens, tokens)
        blind = ~np.repeat(read[:, key_block], size)[: tokens.shape[1]]
        for found, expected in zip(poisoned, clean, strict=True):
            assert np.array_equal(np.asarray(found)[0, blind], np.asarray(expected)[0, blind])


def test_bounds_never_hide_a_visible_pair():
    @functools.partial(jax.jit, static_argnums=2)
    def compared(q, k, window):
        return visible(q, k, window), may_see(bounds(q, 4), bounds(k, 4), window)

    rng = np.random.default_rng(0)
    for _ in range(50):
        fields = [rng.integers(*span, (2, 24)) for span in ((0, 3), (0, 3), (-1, 3), (0, 24))]
        q, k = (
            Tokens(*(jnp.asarray(rng.permuted(x, axis=1), jnp.int32) for x in fields))
            for _ in range(2)
        )
        for window in (None, 3):
            seen, kept = map(np.asarray, compared(q, k, window))
            pairs = seen.reshape(2, 6, 4, 6, 4).any(axis=(2, 4))
            assert pairs.any() and not (pairs & ~kept).any()


def test_merging_parts_equals_the_whole(x64):
    tokens = single(40)
    q, k, v = inputs(tokens, dtype=jnp.float64)
    (weight,) = normal(5, q.shape, dtype=jnp.float64)

    def whole(q, k, v):
        return jnp.sum(dense_attention(q, k, v, tokens, tokens)[0] * weight)

    def parts(q, k, v):
        def rows(x):
            return x.reshape(2, 20, *x.shape[2:])

        asking = tokens.map(lambda x: np.tile(x, (2, 1)))
        keys = rows(k), rows(v), asking, tokens.map(rows)
        outs, lses = dense_attention(jnp.tile(q, (2, 1, 1, 1)), *keys, block=8)
        return jnp.sum(merge((outs[:1], outs[1:]), (lses[:1], lses[1:]))[0] * weight)

    (wanted, wanted_gradients), (found, gradients) = (
        jax.jit(jax.value_and_grad(function, (0, 1, 2)))(q, k, v) for function in (whole, parts)
    )
    assert abs(found - wanted) < 1e-9
    for one, other in zip(gradients, wanted_gradients, strict=True):
        assert relative(one, other) < 1e-12


def test_decoding_token_by_token_equals_prefill():
    tokens = single(33)
    q, k, v = inputs(tokens)
    attend = compiled(window=9)
    whole = np.asarray(attend(q, k, v, tokens, tokens)[0])
    asking = tokens.map(np.asarray)
    for t in range(33):
        at = slice(t, t + 1)
        one, _ = attend(np.asarray(q)[:, at], k, v, asking.map(lambda x, at=at: x[:, at]), tokens)
        assert relative(one, whole[:, at]) < 1e-6


def test_query_heads_that_do_not_divide_are_refused():
    tokens = single(4)
    q, k, v = inputs(tokens, heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="num_heads=3 must be a multiple of num_kv_heads=2"):
        dense_attention(q, k, v, tokens, tokens)
