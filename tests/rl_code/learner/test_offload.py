"""Moments in the host's memory: the same updates bit for bit, and the same again after a
checkpoint.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from models.model_config import MoE
from models.sharding import MeshConfig, make_mesh
from rl_code.learner.update import init_state
from rl_code.metrics import CompilationCounter
from tests.rl_code.learner.steps import LOSS, OPTIMIZER, update_for
from tests.rl_code.learner.test_fsdp import assert_same_bits, packed, placed, rows_of

MESH = MeshConfig(data=2, tensor=2, fsdp=2)
ADAMW = dataclasses.replace(OPTIMIZER, b1=0.9, clip_norm=0.05)
MUON = dataclasses.replace(ADAMW, muon_learning_rate=1e-2)
EXPERTS = MoE(experts=4, active=2, mlp_dim=8, first_dense=1, ranking_bias=True, balance_rate=0.01)


def kinds(opt_state) -> set[str]:
    """The memories in which moments are."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    moments = [x for x in leaves if isinstance(x, nnx.Variable)]
    return {x.sharding.memory_kind for x in jax.tree.leaves(moments)}


def updated(model, mesh, batch, optimizer):
    """(state, metrics) after two updates and a third one, which is refused."""
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
        assert metrics["train/finite"] == 1 and refused["train/finite"] == 0
        assert int(state.step) == 2
        # every part is where it was, so all updates are one program
        assert compilations.count == 0
        assert [x.sharding for x in jax.tree.leaves(state)] == shardings
    return state, metrics


@pytest.mark.parametrize(("optimizer", "changes"), [(ADAMW, {}), (MUON, dict(moe=EXPERTS))])
@pytest.mark.quick(first=1)
def test_updates_with_moments_on_the_host_have_the_same_bits(build, optimizer, changes):
    mesh = make_mesh(MESH)
    model = build.model(**changes)
    wanted, metrics = updated(model, mesh, packed(build), optimizer)
    found, same = updated(model, mesh, packed(build), dataclasses.replace(optimizer, offload=True))
    assert kinds(wanted.opt_state) == {"device"}
    assert kinds(found.opt_state) == {"pinned_host"}
    assert_same_bits(found, wanted)
    assert same == metrics
