"""The attention methods give the same by the kernels as in XLA, and take a kernel by themselves
where one can run.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attention import blockwise
from attention.blocks import entries, in_place
from attention.blockwise import dense_attention
from attention.compressed import compressed_attention, from_pages
from attention.methods.nsa import NSA
from attention.selected import selected_attention
from pallas_kernels.tokens import TAIL, Tokens, sequences
from tests.attention.rows import normal, relative, separate

LENGTH = 48
SPARSE = NSA(length=8, stride=4, block=16, picks=2, initial=1, local=1, window=16)
TOKENS = separate([LENGTH - 3], LENGTH)
BLOCKS = jax.jit(in_place, static_argnums=1)(TOKENS, SPARSE.block)
PICKS = jnp.asarray([[0, -1] if t < 16 else [t // 16, 0] for t in range(LENGTH)], jnp.int32)


def by_dense(q, k, v, **options):
    return dense_attention(q, k, v, TOKENS, TOKENS, window=20, **options)


def by_compressed(q, k, v, **options):
    stretched = entries(BLOCKS, SPARSE.length, SPARSE.stride)
    k, v = (x[:, :: SPARSE.stride] for x in (k, v))
    return compressed_attention(q, k, v, TOKENS, BLOCKS, stretched, SPARSE, **options)


def by_selected(q, k, v, **options):
    picks = jnp.repeat(PICKS[None, :, None], k.shape[2], axis=2)
    return selected_attention(
        q, k, v, picks, TOKENS.order, BLOCKS.order, size=SPARSE.block, **options
    )


@pytest.mark.long
@pytest.mark.parametrize("method", [by_dense, by_compressed, by_selected])
def test_kernels_equal_xla(method):
    q, k, v, weight = normal(
        0, (1, LENGTH, 4, 8), (1, LENGTH, 2, 8), (1, LENGTH, 2, 8), (1, LENGTH, 4, 8)
    )

    def results(**options):
        def total(*qkv):
            out, lse, *picks = method(*qkv, **options)
            return jnp.sum(out * weight) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0)), (
                out,
                *picks,
            )

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)

    gradients, (out, *picks) = results(implementation="tpu", interpret=pltpu.InterpretParams())
    wanted, (want, *want_picks) = results(implementation="xla")
    assert relative(out, want) < 1e-5
    for a, b in zip(gradients, wanted, strict=True):
        assert relative(a, b) < 1e-4
    for a, b in zip(picks, want_picks, strict=True):
        np.testing.assert_array_equal(np.sort(a), np.sort(b))


def cached_row(documents: bool) -> tuple[Tokens, jax.Array]:
    """(the tokens of rows of 96 places in a cache, the places of their last tokens)."""
    if not documents:  # the second row has one new token only, and padding
        return sequences(jnp.array([90, 41]), 96), jnp.array([[88, 89], [40, -1]])
    place = jnp.arange(96)[None]
    # two documents that do not fill their last pages, and the tail
    number = jnp.where(place < 32, 1, jnp.where(place < 64, 2, TAIL))
    filled = (place < 20) | ((place >= 32) & (place < 62)) | ((place >= 64) & (place < 90))
    tokens = Tokens(filled.astype(jnp.int32), jnp.zeros_like(place), number, place)
    return tokens, jnp.array([[89]])


@pytest.mark.long
@pytest.mark.parametrize("documents", [False, True])
def test_decoding_from_pages_of_compressed_keys_equals_rows_side_by_side(documents):
    tokens, places = cached_row(documents)
    (batch, queries) = places.shape
    q_tokens = tokens.map(
        lambda x: jnp.where(places < 0, 0, jnp.take_along_axis(x, jnp.maximum(places, 0), axis=1))
    )
    most = jnp.full(places.shape, jnp.iinfo(jnp.int32).max)
    blocks = dataclasses.replace(in_place(tokens, SPARSE.block), own_from=most, causal=False)
    each = SPARSE.block // SPARSE.stride
    q, k, v = normal(0, (batch, queries, 4, 128), *[(16, 2, each, 128)] * 2)
    table = np.random.default_rng(0).permutation(16)[: 6 * batch].reshape(batch, 6)
    table = jnp.asarray(table, jnp.int32)
    late = SPARSE.length // SPARSE.stride - 1
    stretched = entries(blocks, SPARSE.length, SPARSE.stride).by_last(late)
    own = stretched if documents else None

    @jax.jit
    def by_rows(q, *pages):
        rows = [x[table].transpose(0, 1, 3, 2, 4).reshape(batch, -1, 2, 128) for x in pages]
        options = dict(implementation="xla")
        return compressed_attention(q, *rows, q_tokens, blocks, stretched, SPARSE, **options)

    @jax.jit
    def by_pages(q, *pages):
        options = dict(implementation="tpu", interpret=pltpu.InterpretParams())
        return from_pages(q, pages, table, q_tokens, blocks, own, SPARSE, **options)

    # no kernel for a CPU
    assert from_pages(q, (k, v), table, q_tokens, blocks, own, SPARSE) is None
    (out, lse, picks), (wanted, wanted_lse, wanted_picks) = by_pages(q, k, v), by_rows(q, k, v)
    assert relative(out, wanted) < 1e-5
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5)
    np.testing.assert_array_equal(np.sort(picks), np.sort(wanted_picks))


def test_a_kernel_that_cannot_run_is_refused_by_name_and_passed_over_without(monkeypatch):
    q, k, v = normal(0, (1, LENGTH, 4, 8), (1, LENGTH, 2, 8), (1, LENGTH, 2, 8))
    with pytest.raises(
        ValueError, match="implementation='tpu' cannot run this: backend='cpu' is not 'tpu'"
    ):
        by_dense(q, k, v, implementation="tpu")
    found, wanted = jax.jit(lambda *x: (by_dense(*x), by_dense(*x, implementation="xla")))(q, k, v)
    np.testing.assert_array_equal(found[0], wanted[0])
    asked = []
    monkeypatch.setattr(blockwise, "flash_attention", lambda *_, **options: asked.append(options))
    by_dense(q, k, v)
    (options,) = asked
    assert (options["implementation"], options["window"]) == (None, 20)
