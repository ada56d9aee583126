"""The attention methods give the same by the kernels as in XLA, and take a kernel by themselves
where one can run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attention import blockwise
from attention.blocks import entries, in_place
from attention.blockwise import dense_attention
from attention.compressed import compressed_attention
from attention.methods.nsa import NSA
from attention.selected import selected_attention
from pallas_kernels.tokens import sequences
from tests.attention.rows import normal, relative

LENGTH = 48
SPARSE = NSA(length=8, stride=4, block=16, picks=2, initial=1, local=1, window=16)
TOKENS = sequences(jnp.array([LENGTH - 3]), LENGTH)
BLOCKS = in_place(TOKENS, SPARSE.block)
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


def test_a_kernel_that_cannot_run_is_refused_by_name_and_passed_over_without(monkeypatch):
    q, k, v = normal(0, (1, LENGTH, 4, 8), (1, LENGTH, 2, 8), (1, LENGTH, 2, 8))
    with pytest.raises(
        ValueError, match="implementation='tpu' cannot run this: backend='cpu' is not 'tpu'"
    ):
        by_dense(q, k, v, implementation="tpu")
    np.testing.assert_array_equal(by_dense(q, k, v)[0], by_dense(q, k, v, implementation="xla")[0])
    asked = []
    monkeypatch.setattr(
        blockwise, "flash_attention", lambda *_, **options: asked.append(options["implementation"])
    )
    by_dense(q, k, v)
    assert asked == [None]
