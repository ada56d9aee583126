"""Adapters of a model: new ones compute nothing, others what the merged matrices compute."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention.methods.dense import Dense
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.window import Window
from models.adapted import merged
from models.lora import TARGETS, LoRA, trained
from models.model_config import MoE
from models.transformer import Transformer, abstract_model
from pallas_kernels.tokens import sequences
from rl_code.checkpoint import arrays
from tests.models.small import VOCABULARY, small_config, small_model

ADAPTERS = LoRA(rank=3, alpha=2.0)


@jax.jit
def hidden(model):
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (2, 24), np.int32)
    places = jnp.broadcast_to(jnp.arange(24), tokens.shape)
    where = sequences(jnp.full(2, 24), 24)
    return model.hidden(tokens, places, where, align=0)


def moved(model):
    """With adapters that are not zero."""

    def move(path, x):
        rng = np.random.default_rng(len(jax.tree_util.keystr(path)))
        drawn = rng.standard_normal(x.shape).astype(x.dtype)
        return jax.device_put(np.asarray(x) + np.asarray(0.3, x.dtype) * drawn)

    copy = jax.tree.map(lambda x: x, model)
    for name, part in jax.tree.map_with_path(move, trained(model)).items():
        getattr(copy, name).lora = part
    return copy


def test_new_adapters_begin_as_in_peft_and_leave_the_model_as_it_was():
    plain = small_model((Dense(),))
    model = small_model((Dense(),), lora=dataclasses.replace(ADAPTERS, rank=64))
    these, those = arrays.flatten(plain), arrays.flatten(model)
    assert all(np.array_equal(x, those[name]) for name, x in these.items())
    assert len(those) == len(these) + 2 * len(TARGETS)
    assert np.array_equal(hidden(model), hidden(plain))
    for name, inputs in (("q", 16), ("o", 32), ("down", 24)):
        a = np.asarray(getattr(model.layers.lora, f"{name}_a")[...])
        # uniform within 1 / sqrt(inputs)
        assert 0.9 < np.abs(a).max() * inputs**0.5 <= 1.0
        assert np.std(a) * (3 * inputs) ** 0.5 == pytest.approx(1.0, abs=0.1)
        assert not np.any(getattr(model.layers.lora, f"{name}_b")[...])


@pytest.mark.parametrize(
    "methods, changes",
    [
        ((Dense(),), dict(lora=ADAPTERS)),
        (
            (NSA(length=4, stride=2, block=8, picks=2, initial=1, local=1, window=10), Window(8)),
            dict(lora=dataclasses.replace(ADAPTERS, rslora=True), remat=True),
        ),
        (
            (MoBA(block=8, picks=2),),
            dict(
                lora=dataclasses.replace(ADAPTERS, targets=("q_proj", "o_proj")),
                moe=MoE(experts=4, active=2, mlp_dim=8, first_dense=1),
            ),
        ),
    ],
    ids=["dense", "nsa", "experts"],
)
@pytest.mark.quick(first=1)
def test_adapters_compute_what_merged_matrices_do(methods, changes):
    model = moved(small_model(methods, **changes))
    whole = jax.jit(merged)(model)
    assert whole.config == dataclasses.replace(model.config, lora=None)
    assert jax.tree.structure(whole) == jax.tree.structure(abstract_model(whole.config))
    found = np.asarray(hidden(model))
    assert not np.allclose(found, hidden(small_model(methods, **changes)), atol=0.1)
    np.testing.assert_allclose(found, hidden(whole), atol=2e-4)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(rank=0), "rank=0 must be at least 1"),
        (dict(alpha=0.0), "alpha=0.0 must be positive"),
        (dict(targets=()), "targets has none; it may have q_proj"),
        (dict(targets=("q_proj", "query")), "targets has query; it may have q_proj"),
        (dict(targets=("q_proj", "q_proj")), "names a matrix twice"),
    ],
)
def test_adapters_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        LoRA(**changes)


def test_adapters_of_experts_are_refused():
    experts = MoE(experts=4, active=2, mlp_dim=8)
    with pytest.raises(ValueError, match="targets has gate_proj, up_proj, down_proj, which in"):
        small_config(moe=experts, lora=ADAPTERS)
    plain = Transformer(small_config(num_layers=1), nnx.Rngs(0))
    assert merged(plain) is plain and trained(plain) is plain
