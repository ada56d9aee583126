"""What the backward pass keeps of a layer with ``remat``, and what it computes again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.methods.dense import Dense
from models.model_config import REMAT_KEEPS
from pallas_kernels.tokens import sequences
from planner.flops import matmul_flops
from rl_code.run.sections import ModelSpec
from tests.models.small import VOCABULARY, small_model

# More than a row that keeps all its scores has on CPU.
TOKENS = 192


def gradient(**changes):
    """(leaves of the gradient of a sum of hidden states, operations of the products that make it)."""
    model = small_model((Dense(),), num_layers=2, **changes)
    where = sequences(jnp.array([TOKENS]), TOKENS)
    tokens = jnp.arange(TOKENS, dtype=jnp.int32)[None] * 7 % VOCABULARY

    def loss(model):
        hidden = model.hidden(tokens, where.order, where)
        return jnp.sum(hidden * jnp.cos(jnp.arange(hidden.size).reshape(hidden.shape)))

    program = jax.jit(jax.grad(loss)).lower(model).compile()
    return jax.tree.leaves(program(model)), matmul_flops(program.as_text())


@pytest.mark.long
def test_what_is_kept_is_not_computed_again_and_changes_no_gradient():
    wanted, least = gradient()
    flops = {}
    for keeps in REMAT_KEEPS:
        found, flops[keeps] = gradient(remat=True, remat_keeps=keeps)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)
    assert flops["nothing"] > flops["attention"] > flops["products"] == least


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(remat=True, remat_keeps="all"),
            "remat_keeps='all' must be one of nothing, attention",
        ),
        (dict(remat_keeps="products"), "remat_keeps='products' says what remat keeps: set remat"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec(**settings)
