"""Families that differ from others in biases, a partial rotation, a router or windows by layer: a
sampler gives the trainer's log-probabilities, and a mesh its gradients.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.methods.dense import Dense
from attention.methods.window import Window
from models.model_config import MoE
from models.rope_scaling import LinearScaling
from models.sharding import MeshConfig, make_mesh, parameter_shardings, use_mesh
from pallas_kernels.tokens import packed_rows
from tests.rl_code.rollout.small import (
    ENGINE,
    MODEL,
    VOCAB,
    assert_trained_alike,
    initial,
    play,
    task_of,
    trainer_logprobs,
)

ROUTED = MoE(
    experts=4,
    active=2,
    mlp_dim=16,
    scores="sigmoid",
    scale=2.5,
    ranking_bias=True,
    shared=1,
    first_dense=1,
)
VARIANTS = {
    "windows": dict(
        qkv_bias=True,
        o_bias=True,
        qk_norm=True,
        attention=(Window(6), Dense()),
        rope_scaling=LinearScaling(4.0),
    ),
    # as GLM's layers, with a bias of the output too
    "routed": dict(qkv_bias=True, o_bias=True, qk_norm=True, partial_rotary=0.5, moe=ROUTED),
}


def variant(name: str, **changes):
    """Its config and model, whose biases are random."""
    config = dataclasses.replace(MODEL, **VARIANTS[name] | changes)
    model = initial(config)
    rng = np.random.default_rng(0)

    def drawn(path, x):
        if "bias" not in jax.tree_util.keystr(path):
            return x
        return jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype)

    return config, jax.tree_util.tree_map_with_path(drawn, model)


def played(monkeypatch, name: str, **changes):
    """The trajectories that a variant samples, its config and model."""
    config, model = variant(name, **changes)
    monkeypatch.setattr("tests.rl_code.rollout.small.model_on", lambda *_: model)
    engine = dataclasses.replace(ENGINE, cache_dtype=config.dtype, pages=24)
    groups, stats = play([task_of(seed) for seed in range(4)], model=config, engine=engine)
    assert stats.preempted  # so that some were read in chunks behind what they had sampled
    return [t for group in groups for t in group.trajectories], config, model


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.quick(first=1)
def test_a_sampler_gives_the_log_probabilities_of_the_trainer(name, monkeypatch):
    trajectories, config, model = played(monkeypatch, name)
    assert_trained_alike(trajectories, config, model)


@pytest.mark.long
def test_in_bfloat16_they_differ_by_its_rounding(monkeypatch):
    trajectories, _, model = played(monkeypatch, "routed", dtype="bfloat16")
    differences = []
    for row, t in zip(trainer_logprobs(trajectories, model), trajectories, strict=True):
        predicted = row[np.arange(len(t.tokens) - 1), t.tokens[1:]]
        differences.append(np.abs(t.logprobs[1:] - predicted)[t.sampled[1:]])
    differences = np.concatenate(differences)
    print(differences.mean(), differences.max())
    assert differences.mean() < 0.03


@pytest.mark.long
def test_a_mesh_gives_the_gradients_of_one_device():
    _, model = variant("routed")
    tokens = np.random.default_rng(1).integers(1, VOCAB, (8, 24), dtype=np.int32)

    def loss(model, tokens):
        ones = jnp.ones_like(tokens)
        positions = jnp.cumsum(ones, axis=1) - 1
        where = packed_rows(ones, 0 * ones, positions)
        logits = model.logits(model.hidden(tokens, positions, where, align=0))
        logp = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))

    def gradients(mesh_config):
        mesh = make_mesh(mesh_config)
        with use_mesh(mesh):
            there = jax.device_put(model, parameter_shardings(model, mesh))
            return jax.device_get(jax.jit(jax.grad(loss))(there, tokens))

    alone = jax.tree.leaves(gradients(MeshConfig()))
    cut = jax.tree.leaves(gradients(MeshConfig(data=2, fsdp=2, tensor=2)))
    scale = max(np.abs(x).max() for x in alone)
    for a, b in zip(alone, cut, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * scale)
    assert len(alone) == len(jax.tree.leaves(model))
