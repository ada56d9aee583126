"""Updates of a padded model on the devices that it is padded for: those of the model itself."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

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
    fresh,
    update_for,
)

SIZES = (3, 5, 2, 4, 3, 4, 1, 5)
# so that the gradient is clipped, and by its own length, not by that of copies
CLIPPED = dataclasses.replace(OPTIMIZER, b1=0.9, clip_norm=1e-2)


@pytest.mark.long
def test_two_updates_of_a_padded_model_are_those_of_the_model(build):
    """Six query heads and two key/value heads on four devices; data is cut too."""
    own = build.model(num_heads=6, mlp_dim=30, vocab_size=31)
    config = pad_config(own.config, 4)
    like, itself = abstract_model(config), abstract_model(own.config)
    assert (config.num_heads, config.num_kv_heads) == (8, 4)
    groups = build.groups(SIZES, seed=1)
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.contexts[0].tokens[:] %= 31
    batch = pack(groups, advantages_of(SIZES), PACK, version=0)[0]
    prox = batch.logprobs + 0.1 * np.cos(batch.targets)
    ref = batch.logprobs - 0.2 * np.sin(batch.targets)

    def trained(model, mesh):
        mesh = make_mesh(mesh)
        model = fresh(model)
        with jax.set_mesh(mesh):
            model = jax.device_put(model, parameter_shardings(model, mesh))
            state = init_state(model, CLIPPED)
            rows = jax.device_put(batch, NamedSharding(mesh, partition_spec(("batch",))))
            update = update_for(LOSS, CLIPPED, 2)
            for _ in range(2):
                state, metrics = update(state, rows, prox, ref)
            return jax.device_get(state.model), jax.device_get(metrics)

    alone, metrics_alone = trained(own, MeshConfig(1, 1))
    larger = jax.jit(lambda x: pad(x, like))(own)
    found, metrics = trained(larger, MeshConfig(data=2, tensor=4))
    assert metrics["train/grad_norm"] > CLIPPED.clip_norm
    assert_close(metrics, metrics_alone, rtol=1e-4)
    back = jax.jit(lambda x: cut(x, itself))(found)
    assert_close(back, alone, rtol=1e-4)
    # copies are still copies, and zeros zeros
    again = jax.jit(lambda x: pad(x, like))(back)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(found), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
