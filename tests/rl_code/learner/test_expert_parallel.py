"""Experts that are cut over the mesh axis ``expert``: the same updates as on one device."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from models.model_config import MoE
from models.sharding import MeshConfig, make_mesh, parameter_shardings, partition_spec
from rl_code.learner.batching import pack
from rl_code.learner.update import init_state
from tests.rl_code.learner.steps import (
    LOSS,
    OPTIMIZER,
    PACK,
    advantages_of,
    assert_close,
    first_step,
    fresh,
    shuffled_rows,
    update_for,
)

SIZES = (3, 5, 2, 4, 3, 4, 1, 5)
EXPERTS = {
    "qwen3": MoE(experts=8, active=2, mlp_dim=8, balance_loss=0.1),
    "deepseek": MoE(
        experts=8,
        active=2,
        mlp_dim=8,
        scores="sigmoid",
        ranking_bias=True,
        groups=4,
        active_groups=2,
        shared=1,
        first_dense=1,
        balance_rate=0.1,
    ),
}
MESHES = {
    "expert 8": MeshConfig(expert=8),
    "data 2 x expert 2 x tensor 2": MeshConfig(data=2, expert=2, tensor=2),
    "fsdp 2 x expert 2 x tensor 2": MeshConfig(fsdp=2, expert=2, tensor=2),
}
CASES = (
    ("expert 8", "qwen3"),
    ("fsdp 2 x expert 2 x tensor 2", "deepseek"),
    ("expert 8", "deepseek"),
    ("data 2 x expert 2 x tensor 2", "qwen3"),
)


def first_step_on(mesh, model, batch):
    """``first_step`` on a mesh, in two micro-batches."""
    model = fresh(model)
    with jax.set_mesh(mesh):
        state = init_state(jax.device_put(model, parameter_shardings(model, mesh)), OPTIMIZER)
        batch = jax.device_put(
            shuffled_rows(batch), NamedSharding(mesh, partition_spec(("batch",)))
        )
        prox = batch.logprobs + 0.1 * np.cos(batch.targets)
        ref = batch.logprobs - 0.2 * np.sin(batch.targets)
        state, metrics = update_for(LOSS, OPTIMIZER, 2)(state, batch, prox, ref)
    return optax.tree.get(state.opt_state, "mu"), metrics, state


@pytest.mark.parametrize("mesh, experts", CASES)
@pytest.mark.quick(first=2)
def test_updates_are_those_of_one_device(build, mesh, experts):
    model = build.model(moe=EXPERTS[experts])
    batch = pack(build.groups(SIZES, seed=1), advantages_of(SIZES), PACK, version=0)[0]
    gradient, metrics, alone = first_step(model, batch)
    found, found_metrics, state = first_step_on(make_mesh(MESHES[mesh]), model, batch)
    assert_close(found, gradient)
    assert_close(found_metrics, metrics)
    assert_close(state.model, alone.model, rtol=1e-4)
    up = state.model.layers.expert_up[...]
    assert up.addressable_shards[0].data.shape[1] == 8 // MESHES[mesh].expert
