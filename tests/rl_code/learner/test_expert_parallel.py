"""Experts that are cut over devices: the same updates as on one device."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from models.model_config import MoE
from models.padding import cut, pad, pad_config
from models.sharding import MeshConfig, make_mesh, parameter_shardings, partition_spec
from models.transformer import abstract_model
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
# Not as many as there are devices.
EXPERTS = MoE(
    experts=6,
    active=2,
    mlp_dim=8,
    scores="sigmoid",
    ranking_bias=True,
    groups=3,
    active_groups=2,
    shared=1,
    first_dense=1,
    balance_loss=0.1,
    balance_rate=0.1,
    # added once where devices have parts of an expert
    biases=True,
)
CASES = {
    "expert 4 x tensor 2": (MeshConfig(expert=4, tensor=2), dict(remat=True), {}),
    "fsdp 2 x expert 2 x tensor 2, folded": (
        MeshConfig(fsdp=2, expert=2, tensor=2),
        {},
        dict(fold=True),
    ),
}


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_updates_are_those_of_one_device(build, case):
    """Activations are cut over ``tensor`` by tokens, also where their layers are computed again."""
    config, changes, options = CASES[case]
    batch = pack(build.groups(SIZES, seed=1), advantages_of(SIZES), PACK, version=0)[0]
    gradient, metrics, alone = first_step(build.model(moe=EXPERTS), batch)
    moe = dataclasses.replace(EXPERTS, **options)
    model = build.model(moe=moe, sequence_parallel=True, **changes)
    devices = config.expert * (config.tensor if options else 1)
    like, itself = (abstract_model(x) for x in (pad_config(model.config, 1, devices), model.config))
    larger = jax.jit(lambda x: pad(x, like))(model)
    found, found_metrics, state = first_step_on(make_mesh(config), larger, batch)
    found, changed = (cut(x, itself) for x in jax.device_get((found, state.model)))
    assert_close(found, gradient)
    assert_close(found_metrics, metrics)
    assert_close(changed, alone.model, rtol=1e-4)
    part = state.model.layers.expert_up[...].addressable_shards[0].data
    assert part.shape[1] == -(-EXPERTS.experts // devices)
