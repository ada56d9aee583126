"""Values and their updates do not depend on the layout of tokens or of devices: in packed rows, in
trees of contexts, with documents, with layers that choose blocks, with adapters, with experts and
on meshes they are those of contexts that stand alone on one device.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from attention.methods.moba import MoBA
from attention.methods.sinks import Sinks
from models.lora import LoRA, trained, with_trained
from models.model_config import MoE
from models.sharding import MeshConfig, make_mesh, parameter_shardings, partition_spec
from rl_code.learner.batching import pack
from rl_code.learner.gae import GAE
from rl_code.learner.value_credit import with_values
from tests.rl_code.learner import test_documents as documents
from tests.rl_code.learner import test_trees as trees
from tests.rl_code.learner.steps import (
    OPTIMIZER,
    advantages_of,
    assert_close,
    fresh,
    update_for,
)
from tests.rl_code.learner.test_values import (
    LOSS,
    PACK,
    SEPARATE,
    SHARED,
    SIZES,
    bits,
    mu,
    packed,
    state_of,
    targeted,
    value_update_for,
    values_for,
)

ADAPTERS = dict(lora=LoRA(rank=2, alpha=3.0))
# Tokens are cut over tensor, too, between the products of layers.
CUT = dict(attention=(Sinks(), MoBA(block=8, picks=2)), sequence_parallel=True)
EXPERTS = dict(moe=MoE(experts=4, active=2, mlp_dim=8, ranking_bias=True, balance_rate=0.01))


def values_of(model, batch, config=SHARED, micro_batches=1, runs=0):
    critic = state_of(model, config).value.critic
    return np.asarray(values_for(micro_batches, runs)(model, critic, batch))


def updated(state, batch, config, micro_batches=1, runs=0):
    """(state, metrics) after one update of the policy and the value function, or of this alone."""
    if config.backbone == "shared":
        update = update_for(LOSS, OPTIMIZER, micro_batches, runs, value=config)
    else:
        update = value_update_for(config, micro_batches, runs)
    return update(state, batch)


def gradients(state):
    """Those of the last update of the policy and of the value function."""
    return mu(state.opt_state), mu(state.value.opt_state)


# --- Tokens ---------------------------------------------------------------------------------------


def test_values_do_not_depend_on_the_packing(build):
    model = build.model()
    groups = build.groups(SIZES, seed=1)
    credit = advantages_of(SIZES)
    batch, _ = pack(groups, credit, PACK, version=0)
    together = values_of(model, batch, micro_batches=2)
    number = 0
    for group in groups:
        for trajectory in group.trajectories:
            alone, _ = pack([build.group([trajectory])], [[1.0]], PACK, version=0)
            wanted = values_of(model, alone)[alone.mask > 0]
            found = together[(batch.trajectories == number) & (batch.mask > 0)]
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
            number += 1


def make_trees(build):
    """(groups of trees, an advantage for every sampled token of each trajectory)."""
    rng = np.random.default_rng(5)
    brief = rng.integers(0, build.vocab, 5)
    groups = [
        build.group([trees.as_tree(rng, t, brief) for t in group.trajectories], number)
        for number, group in enumerate(build.groups(trees.SIZES, seed=3))
    ]
    advantages = [
        [rng.standard_normal(t.sampled.sum()).astype(np.float32) for t in group.trajectories]
        for group in groups
    ]
    return groups, advantages


@pytest.mark.long
@pytest.mark.parametrize(
    "methods, config", [("dense-window", SHARED), ("moba-documents", SEPARATE)]
)
def test_trees_have_the_values_and_the_gradient_of_their_contexts(build, methods, config):
    groups, advantages = make_trees(build)
    model = build.attending(methods)
    # 0, or a bound by which trees are repeated below the prompt
    runs = 0 if methods == "dense-window" else 20
    shapes = dataclasses.replace(trees.ANY_DEPTH, rows=8, slots=280, runs=runs)
    batch, _ = pack(groups, advantages, shapes, version=0)
    apart = trees.one_by_one(groups, advantages, shapes.slots)
    states = []
    for each in (batch, apart):
        state, metrics = updated(state_of(model, config), targeted(each), config, 2, runs)
        states.append((gradients(state), metrics))
    assert_close(states[0], states[1], floor=0.01)
    # returns and advantages of every context
    credited = []
    for each in (batch, apart):
        values = np.where(each.mask > 0, np.sin(each.targets), 0.0).astype(np.float32)
        changed, found = with_values(each, groups, values, GAE(0.9), config)
        fields = (changed.advantages, changed.returns, changed.values)
        credited.append(([documents.by_trajectory(x, changed) for x in fields], found))
    for one, two in zip(*(fields for fields, _ in credited), strict=True):
        np.testing.assert_array_equal(one, two)
    assert credited[0][1] == credited[1][1]


@pytest.mark.long
def test_documents_have_the_values_of_their_contexts_alone(build):
    groups = documents.make_groups(build, documents.SIZES)
    model = build.attending("moba-documents")
    runs = documents.PACK.runs
    batch, _ = pack(groups, advantages_of(documents.SIZES), documents.PACK, version=0)
    together = values_of(model, batch, runs=runs)
    found = documents.by_trajectory(together, batch)
    alone = []
    for group in groups:
        for trajectory in group.trajectories:
            one, _ = pack([build.group([trajectory])], [[1.0]], documents.PACK, version=0)
            alone.append(values_of(model, one, runs=runs)[one.mask > 0])
    np.testing.assert_allclose(found, np.concatenate(alone), rtol=1e-4, atol=1e-5)


# --- Models ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("config", [SHARED, SEPARATE])
def test_adapters_have_a_value_function_and_frozen_parameters_have_none(build, config):
    model = build.model(**ADAPTERS, num_heads=4)
    batch = packed(build)
    state = state_of(model, config)
    own = state.value.critic.backbone
    adapters = len(jax.tree.leaves(trained(model)))
    assert len(jax.tree.leaves(own)) == (adapters if config.backbone == "separate" else 0)
    before = bits(trained(model))
    state, metrics = updated(state, batch, config)
    assert len(jax.tree.leaves(mu(state.opt_state))) == adapters
    # the whole model has frozen parameters, which no update changes
    frozen = jax.tree.map(jnp.zeros_like, trained(model))
    assert bits(with_trained(state.model, frozen)) == bits(with_trained(model, frozen))
    assert np.isfinite(metrics["value/loss"]) and metrics["value/grad_norm"] > 0
    if config.backbone == "shared":
        assert bits(trained(state.model)) != before
        return
    assert bits(trained(state.model)) == before
    first = values_for(1)(model, state.value.critic, batch)
    others = dataclasses.replace(state.value.critic, backbone=trained(model))
    assert not np.allclose(first, values_for(1)(model, others, batch))


# --- Devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, mesh, changes",
    [
        (SEPARATE, MeshConfig(data=2, fsdp=2, tensor=2), EXPERTS),
        (SHARED, MeshConfig(data=2, context=2, tensor=2), CUT),
        (SEPARATE, MeshConfig(data=2, fsdp=2, tensor=2), ADAPTERS),
    ],
    ids=["experts", "context", "adapters"],
)
@pytest.mark.long
def test_updates_in_micro_batches_on_a_mesh_are_those_of_one_device(build, config, mesh, changes):
    model = build.model(num_heads=4, **changes)
    # each micro-batch has some of the filled rows, which come first
    order = [0, 4, 5, 6, 1, 2, 3, 7]
    batch = jax.tree.map(lambda x: x[order], packed(build))
    before = bits(model)
    real = batch.mask > 0
    assert real[:4].any() and real[4:].any() and not real.any(axis=1).all()
    runs = 20
    wanted_values = values_of(model, batch, config, runs=runs)
    wanted, metrics = jax.device_get(updated(state_of(model, config), batch, config, runs=runs))
    devices = make_mesh(mesh)
    placed = jax.device_put(fresh(model), parameter_shardings(model, devices))
    with jax.set_mesh(devices):
        state = state_of(placed, config)
        if model.config.moe is not None:
            assert placed.layers.expert_up[...].sharding.spec[-1] == "tensor"
        if mesh.fsdp:
            assert state.value.critic.head.weight[...].sharding.spec == partition_spec(("embed",))
        rows = jax.device_put(batch, NamedSharding(devices, partition_spec(("batch",))))
        values = values_for(2, runs)(state.model, state.value.critic, rows)
        assert values.is_fully_replicated
        values = np.asarray(values)
        np.testing.assert_allclose(values[real], wanted_values[real], rtol=1e-4, atol=1e-5)
        shardings = [x.sharding for x in jax.tree.leaves(state)]
        state, found = updated(state, rows, config, 2, runs)
        assert [x.sharding for x in jax.tree.leaves(state)] == shardings
        state, found = jax.device_get((state, found))
    assert_close(gradients(state), gradients(wanted))
    assert_close(found, metrics)
    # values alone leave the policy as it was, the biases of its experts too
    assert (bits(state.model) == before) == (config.backbone == "separate")
