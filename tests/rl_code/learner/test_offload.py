"""Moments in the host's memory: the same updates bit for bit, and the same again after a
checkpoint.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from configs import quickstart
from models.model_config import MoE
from models.sharding import MeshConfig, make_mesh
from models.transformer import abstract_model
from pallas_kernels.tokens import sequences
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config.read_config import ConfigError, build
from rl_code.learner import offload
from rl_code.learner.update import abstract_state, init_state
from rl_code.learner.value_config import ValueConfig
from rl_code.learner.value_update import make_value_update
from rl_code.metrics.values import CompilationCounter
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from tests.rl_code.learner.steps import (
    LOSS,
    OPTIMIZER,
    assert_left_alone,
    update_for,
    without_targets,
)
from tests.rl_code.learner.test_fsdp import assert_same_bits, packed, placed, rows_of
from tests.rl_code.learner.test_values import targeted

MESH = MeshConfig(data=2, tensor=2, fsdp=2)
ADAMW = dataclasses.replace(OPTIMIZER, b1=0.9, clip_norm=0.05)
MUON = dataclasses.replace(ADAMW, muon_learning_rate=1e-2)
EXPERTS = MoE(experts=4, active=2, mlp_dim=8, first_dense=1, ranking_bias=True, balance_rate=0.01)


# Alone in a process they pass on CPU. After some 150 other tests in the same process JAX's CPU client
# aborted in them, or in a later test.
RUNS_ON_THE_HOST = pytest.mark.slow(
    reason="arrays in pinned_host have ended a CPU process that ran many programs"
)


def kinds(opt_state) -> set[str]:
    """The memories in which moments are."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    moments = [x for x in leaves if isinstance(x, nnx.Variable)]
    return {x.sharding.memory_kind for x in jax.tree.leaves(moments)}


def loss(model):
    tokens = np.arange(16)[None]
    where = sequences(np.array([16]), 16)
    return model.logits(model.hidden(tokens, where.order, where)).sum()


def updated(model, mesh, batch, optimizer):
    """(state, metrics) after two updates, a third one, which is refused, and one without targets."""
    model = placed(model, mesh)
    with jax.set_mesh(mesh):
        state = init_state(model, optimizer)
        shardings = [x.sharding for x in jax.tree.leaves(state)]
        batch = jax.device_put(batch, rows_of(mesh))
        broken = dataclasses.replace(batch, advantages=batch.advantages * np.nan)
        others = batch.logprobs, batch.logprobs - 0.2
        update = update_for(LOSS, optimizer, 2)
        state, _ = update(state, batch, *others)
        with CompilationCounter() as compilations:
            state, metrics = update(state, batch, *others)
            state, refused = update(state, broken, *others)
            idle = without_targets(batch)
            idle = dataclasses.replace(idle, mask=jax.device_put(idle.mask, rows_of(mesh)))
            state = assert_left_alone(update, state, idle, *others)
        assert metrics["train/finite"] == 1 and refused["train/finite"] == 0
        assert int(state.step) == 2
        # every part is where it was, so all updates are one program
        assert compilations.count == 0
        assert [x.sharding for x in jax.tree.leaves(state)] == shardings
    return state, metrics


@RUNS_ON_THE_HOST
@pytest.mark.parametrize(("optimizer", "changes"), [(ADAMW, {}), (MUON, dict(moe=EXPERTS))])
def test_updates_with_moments_on_the_host_have_the_same_bits(build, optimizer, changes):
    mesh = make_mesh(MESH)
    model = build.model(**changes)
    wanted, metrics = updated(model, mesh, packed(build), optimizer)
    found, same = updated(model, mesh, packed(build), dataclasses.replace(optimizer, offload=True))
    assert kinds(wanted.opt_state) == {"device"}
    assert kinds(found.opt_state) == {"pinned_host"}
    assert_same_bits(found, wanted)
    assert same == metrics


@RUNS_ON_THE_HOST
def test_a_checkpoint_has_the_moments_and_brings_them_back_to_the_host(build, tmp_path):
    optimizer = dataclasses.replace(ADAMW, offload=True)
    mesh = make_mesh(MESH)
    state, _ = updated(build.model(), mesh, packed(build), optimizer)
    with jax.set_mesh(mesh):
        with Checkpoints(tmp_path, {}, keep=1) as checkpoints:
            checkpoints.save(2, state, {})
        fresh = abstract_state(abstract_model(build.model().config, mesh), optimizer)
        restored = checkpoint.load(tmp_path, fresh).state
        # or to the device, for a run that does not offload
        plain = abstract_state(abstract_model(build.model().config, mesh), ADAMW)
        moved = checkpoint.load(tmp_path, plain).state
    for found, kind in ((restored, "pinned_host"), (moved, "device")):
        assert_same_bits(found, state)
        assert kinds(found.opt_state) == {kind}


@RUNS_ON_THE_HOST
@pytest.mark.parametrize("backbone", ["shared", "separate"])
def test_a_value_function_with_moments_on_the_host_has_the_same_bits(build, backbone):
    mesh = make_mesh(MESH)
    states = []
    for moments in (False, True):
        own = dataclasses.replace(ADAMW, offload=moments)
        value = ValueConfig(optimizer=own, backbone=backbone)
        model = placed(build.model(), mesh)
        with jax.set_mesh(mesh):
            state = init_state(model, ADAMW, value)
            found = abstract_state(abstract_model(build.model().config, mesh), ADAMW, value)
            wanted = [x.sharding.memory_kind for x in jax.tree.leaves(state)]
            assert [x.sharding.memory_kind for x in jax.tree.leaves(found)] == wanted
            batch = jax.device_put(targeted(packed(build)), rows_of(mesh))
            for _ in range(2):
                state, metrics = make_value_update(value, 2)(state, batch)
        assert kinds(state.value.opt_state) == {"pinned_host" if moments else "device"}
        states.append((state, metrics))
    assert_same_bits(*(state for state, _ in states))
    assert states[0][1] == states[1][1] and int(states[0][0].value.updates) == 2


@RUNS_ON_THE_HOST
def test_hidden_states_that_wait_on_the_host_give_the_same_update(build):
    mesh = make_mesh(MESH)
    wanted, metrics = updated(build.model(remat=True), mesh, packed(build), ADAMW)
    model = build.model(remat=True, offload_activations=True)
    found, same = updated(model, mesh, packed(build), ADAMW)
    assert_same_bits(found, wanted)
    assert same == metrics
    # what the layers get is all that is named, and goes to the host once for the scan of layers
    text = str(jax.make_jaxpr(jax.grad(loss))(model))
    assert text.count("name=before_layer") == 1 and "<host>" in text
    assert "<host>" not in str(jax.make_jaxpr(jax.grad(loss))(build.model(remat=True)))


def test_what_cannot_be_offloaded_is_refused_in_one_line(tmp_path, monkeypatch):
    settings = quickstart.get_config("smoke")
    settings.train.optimizer.offload = True
    config = build(RunConfig, settings)
    monkeypatch.setattr(offload, "has_host_memory", lambda device: False)
    message = r"config\.train\.optimizer\.offload = True: .* no memory of the kind 'pinned_host'"
    with pytest.raises(ConfigError, match=message):
        Run(config, tmp_path)
    with settings.unlocked():
        settings.model.offload_activations = True
    with pytest.raises(ConfigError, match="moves what remat keeps to the host: set remat=True"):
        build(RunConfig, settings)
    settings.train.pack.prompt_slots = 64
    with settings.unlocked():
        settings.model.remat = True
    with pytest.raises(ConfigError, match=r"set model\.offload_activations=False"):
        build(RunConfig, settings)
