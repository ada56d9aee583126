"""Sums of gradients over micro-batches: in place, and of matrices that are cast once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.methods.dense import Dense
from attention.methods.gated_delta import GatedDelta
from models.casts import casts_of
from models.lora import LoRA
from pallas_kernels.tokens import sequences
from rl_code.learner.objective import Terms
from rl_code.learner.update import accumulate
from tests.models.small import small_model


@pytest.mark.long
@pytest.mark.parametrize("kind", ["states", "adapters"])
def test_matrices_cast_before_the_micro_batches_have_the_gradients_of_their_own_casts(build, kind):
    kinds = {
        # two layers in a period, which are computed again
        "states": dict(attention=(GatedDelta(), Dense()), remat=True),
        "adapters": dict(lora=LoRA(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))),
    }
    model = build.model(dtype="bfloat16", **kinds[kind])
    casts = casts_of(model)["layers"]
    assert {x.dtype for x in casts.values()} == {jnp.dtype("bfloat16")}
    assert {"q", "o", "down"} <= set(casts)
    where = sequences(jnp.array([24]), 24)

    def loss(model, _, i):
        hidden = model.hidden(where.order, where.order, where, 1)
        weight = jnp.cos(where.order[..., None]) * (1.0 + i)
        return jnp.sum(hidden.astype(jnp.float32) * weight), Terms({}, {})

    found = []
    for several in (False, True):
        run = jax.jit(functools.partial(accumulate, loss, several=several))
        found.append(run(model, None, jnp.int32(3)))
    (value, _, gradients, _), (same, _, others, _) = found
    assert float(value) == pytest.approx(float(same), rel=1e-2)
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, x, atol=2e-2 * float(jnp.abs(x).max()))


def test_gradients_of_micro_batches_are_added_in_place():
    """Beside the sums there is no stack of the gradients of one micro-batch."""
    model = jax.eval_shape(lambda: small_model((Dense(),), num_layers=8, embed_dim=64, mlp_dim=256))
    where = sequences(jnp.array([4]), 4)

    def loss(model, _, i):
        return jnp.sum(model.hidden(where.order, where.order, where)) * i, Terms({}, {})

    program = jax.jit(functools.partial(accumulate, loss)).lower(model, None, jnp.int32(3))
    size = sum(4 * x.size for x in jax.tree.leaves(model))
    sizes = program.compile().memory_analysis()
    assert sizes.temp_size_in_bytes < size / 2 < sizes.output_size_in_bytes
