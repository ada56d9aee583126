"""Activations that are cut over ``tensor`` by tokens: the same updates, with fewer of them kept."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from models.model_config import MoE
from models.sharding import MeshConfig, make_mesh, parameter_shardings, partition_spec
from models.transformer import abstract_model
from rl_code.learner.batching import PackConfig, empty_batch, pack
from rl_code.learner.update import abstract_state, init_state
from tests.models.small import small_config
from tests.rl_code.learner.conftest import METHODS
from tests.rl_code.learner.steps import (
    LOSS,
    ONE,
    OPTIMIZER,
    SIZES,
    advantages_of,
    assert_close,
    first_step,
    fresh,
    update_for,
)

# Activations are cut around attention, whatever its method, and around what follows it. A dense
# model is cut so in test_context_parallel.py.
MODEL = dict(attention=METHODS["nsa"], moe=MoE(experts=4, active=2, mlp_dim=8, shared=1))


def lowered(model, mesh, batch):
    """The update of a model on a mesh, and its state."""
    model = fresh(model)
    with jax.set_mesh(mesh):
        model = jax.device_put(model, parameter_shardings(model, mesh))
        state = init_state(model, OPTIMIZER)
        rows = jax.device_put(batch, NamedSharding(mesh, partition_spec(("batch",))))
        ref = batch.logprobs - 0.2 * np.sin(batch.targets)
        prox = batch.logprobs + 0.1 * np.cos(batch.targets)
        return update_for(LOSS, OPTIMIZER, 2, ONE.runs), (state, rows, prox, ref)


@pytest.mark.long
def test_updates_are_those_of_one_device(build):
    own = build.model(num_heads=4, num_kv_heads=4, remat=True, **MODEL)
    cut = build.model(num_heads=4, num_kv_heads=4, remat=True, sequence_parallel=True, **MODEL)
    batch = pack(build.turns(SIZES), advantages_of(SIZES), ONE, version=0)[0]
    gradient, metrics, _ = first_step(own, batch, runs=ONE.runs)
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    update, arguments = lowered(cut, mesh, batch)
    with jax.set_mesh(mesh):
        state, found = update(*arguments)
    assert_close(optax.tree.get(state.opt_state, "mu"), gradient)
    assert_close(found, metrics)


def kept_bytes(sequence_parallel: bool) -> int:
    """Temporary memory of an update of many thin layers over long rows on eight devices."""
    shape = dict(embed_dim=64, num_layers=24, num_heads=8, num_kv_heads=8, remat=True)
    mesh = make_mesh(MeshConfig(data=1, tensor=8))
    pack_config = PackConfig(1, 2048, 64, 0, False)
    with jax.set_mesh(mesh):
        config = small_config(**shape, sequence_parallel=sequence_parallel)
        model = abstract_model(config, mesh)
        state = abstract_state(model, OPTIMIZER)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, np.asarray(x).dtype),
            empty_batch(pack_config, 1),
        )
        update = update_for(LOSS, OPTIMIZER, 1)
        compiled = update.lower(state, batch, batch.mask, batch.mask).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_activations_that_wait_for_the_backward_pass_are_cut():
    whole, cut = (kept_bytes(on) for on in (False, True))
    # 24 layers keep their input, 2,048 tokens of 64 numbers: 12 MiB on every device, or an eighth
    saved = 24 * 2048 * 64 * 4
    assert whole - cut > 0.8 * (saved - saved // 8)
