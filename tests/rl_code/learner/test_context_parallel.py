"""Rows whose tokens are cut over the axis ``context``: the same updates on eight devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from attention.methods.dense import Dense
from attention.methods.gated_documents import GatedDocuments
from models.model_config import MoE
from models.sharding import MeshConfig, make_mesh, parameter_shardings, partition_spec
from models.transformer import abstract_model
from planner.kernel_programs import changed
from rl_code.config.read_config import ConfigError
from rl_code.learner.batching import PackConfig, empty_batch, pack
from rl_code.learner.logprobs import batch_logprobs
from rl_code.learner.update import init_state
from rl_code.run.config import check_rows
from tests.models.small import small_config
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

EXPERTS = MoE(experts=4, active=2, mlp_dim=8, shared=1, biases=True, fold=True)


def start(model, mesh, batch):
    """The state of a model on a mesh, and the other arguments of an update."""
    model = jax.device_put(model, parameter_shardings(model, mesh))
    state = init_state(model, OPTIMIZER)
    rows = jax.device_put(batch, NamedSharding(mesh, partition_spec(("batch",))))
    ref = batch.logprobs - 0.2 * np.sin(batch.targets)
    prox = batch.logprobs + 0.1 * np.cos(batch.targets)
    return state, rows, prox, ref


@pytest.mark.long
def test_updates_are_those_of_one_device(build):
    """Heads, tokens and experts are cut. Layers of other methods are in test_shared_prompt.py, on
    four parts of a row, in test_meshes.py and, with sequence parallelism, in test_value_layouts.py.
    """
    model = build.model(
        attention=(GatedDocuments(),), num_layers=1, num_heads=4, num_kv_heads=2, moe=EXPERTS
    )
    batch = pack(build.turns(SIZES), advantages_of(SIZES), ONE, version=0)[0]
    gradient, metrics, _ = first_step(model, batch, runs=ONE.runs)
    mesh = make_mesh(MeshConfig(context=2, expert=2, tensor=2))
    copy = fresh(model)
    with jax.set_mesh(mesh):
        arguments = start(copy, mesh, batch)
        state, found = update_for(LOSS, OPTIMIZER, 2, ONE.runs)(*arguments)
    assert_close(optax.tree.get(state.opt_state, "mu"), gradient)
    assert_close(found, metrics)


def working_bytes(context: int) -> int:
    """Temporary memory of a device in a gradient of a model over one long row."""
    mesh = make_mesh(MeshConfig(context=context))
    with jax.set_mesh(mesh):
        config = small_config(attention=(Dense(),), remat=True, num_layers=2)
        model = abstract_model(config, mesh)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, np.asarray(x).dtype),
            empty_batch(PackConfig(1, 2**14, 64, 0, False), 1),
        )
        gradient = jax.jit(jax.grad(lambda *given: jnp.sum(batch_logprobs(*given, 1.0, runs=2)[0])))
        compiled = gradient.lower(model, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_memory_of_a_device_falls_with_its_part_of_the_row():
    whole, cut = (working_bytes(context) for context in (1, 8))
    # every device knows of whole rows who sees whom
    assert cut < whole / 6


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"train.pack.slots": 100}, r"train.pack.slots=100 must be a multiple of mesh.context=8"),
        ({"sft.slots": 100}, r"sft.slots=100 must be a multiple of mesh.context=8"),
        ({"train.pack.prompt_slots": 60}, r"prompt_slots=60 must be a multiple of mesh.context=8"),
        ({"rollout.mesh.context": 2}, r"mesh.context=2 must be 1: .* set mesh.data=2"),
    ],
)
def test_rows_that_cannot_be_cut_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        changed("quickstart", {"mesh.context": 8} | changes)


def test_rows_that_cannot_be_shared_out_are_refused():
    config = changed("quickstart", {})
    check_rows(config, 2)
    with pytest.raises(ConfigError, match=r"rows = \d+ .* do not divide by the 7 devices"):
        check_rows(config, 7)


def test_shapes_that_follow_from_others_can_be_cut():
    pack = changed("quickstart", {"mesh.context": 7, "sft.slots": 161}).train.pack
    assert pack.slots % 7 == 0 and pack.targets % 7 == 0
