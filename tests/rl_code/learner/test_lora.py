"""An update of a model with adapters: their gradient is that of the merged matrices by the chain
rule, on every mesh and in two phases, and everything else stays as it was, bit for bit.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

from models.adapted import merged
from models.lora import TARGETS, LoRA, trained, with_trained
from models.sharding import MeshConfig, make_mesh, parameter_shardings
from rl_code.learner.two_phase_batching import pack_completions
from tests.rl_code.learner.steps import (
    LOSS,
    OPTIMIZER,
    TWO,
    advantages_of,
    assert_close,
    first_step,
    laid_out,
    shuffled_rows,
    update_for,
)
from tests.rl_code.learner.test_fsdp import (
    SIZES,
    assert_same_bits,
    packed,
    placed,
    rows_of,
    state_on,
)

ADAPTERS = LoRA(rank=2, alpha=3.0)
# two or three prompts in a row
PHASES = dataclasses.replace(TWO, prompt_slots=16, runs=0)


@pytest.fixture(scope="module")
def model(build):
    """With adapters that are not zero."""
    return build.model(lora=ADAPTERS, num_heads=4)


@pytest.fixture(scope="module")
def alone(build, model):
    return first_step(model, packed(build))


def by_the_chain_rule(model, of_merged):
    """The gradient of the adapters from that of the merged matrices."""
    lora = model.layers.lora
    found = {}
    for name in TARGETS.values():
        a, b = (np.asarray(getattr(lora, f"{name}_{part}")[...], np.float64) for part in "ab")
        whole = np.asarray(getattr(of_merged.layers, name)[...], np.float64)
        layers, rank = b.shape[:2]
        flat = a.reshape(layers, -1, rank)
        of_w = whole.reshape(layers, flat.shape[1], -1)
        found[f"{name}_a"] = np.einsum("LDF,LRF->LDR", of_w, b.reshape(layers, rank, -1))
        found[f"{name}_b"] = np.einsum("LDF,LDR->LRF", of_w, flat)
        found[f"{name}_a"] = lora.scale * found[f"{name}_a"].reshape(a.shape)
        found[f"{name}_b"] = lora.scale * found[f"{name}_b"].reshape(b.shape)
    return found


def test_adapters_are_trained_and_the_rest_is_frozen(model, alone):
    grads, _, state = alone
    # no moments of frozen parameters
    assert len(jax.tree.leaves(grads)) == 2 * len(TARGETS)
    before = jax.tree.leaves(trained(model))
    moved = jax.tree.leaves(trained(state.model))
    assert all(not np.array_equal(one, other) for one, other in zip(before, moved, strict=True))
    # everything else, with the adapters that the model began with
    assert_same_bits(with_trained(state.model, trained(model)), model)


@pytest.mark.long
def test_gradients_are_those_of_merged_matrices(build, model, alone):
    grads, metrics, _ = alone
    whole, metrics_whole, _ = first_step(jax.jit(merged)(model), packed(build))
    wanted = by_the_chain_rule(model, whole)
    # with no weight decay of frozen parameters
    found = {name: getattr(grads["layers"], name)[...] for name in wanted}
    assert len(wanted) == 2 * len(TARGETS)
    assert_close(found, wanted, rtol=1e-4)
    assert_close(metrics, metrics_whole, rtol=1e-4, skip=("grad_norm",))


@pytest.mark.long
def test_updates_on_a_mesh_are_those_of_one_device(build, model, alone):
    mesh = make_mesh(MeshConfig(data=2, tensor=2, fsdp=2))
    state = state_on(model, mesh)
    with jax.set_mesh(mesh):
        batch = jax.device_put(shuffled_rows(packed(build)), rows_of(mesh))
        prox = batch.logprobs + 0.1 * np.cos(batch.targets)
        ref = batch.logprobs - 0.2 * np.sin(batch.targets)
        state, metrics = update_for(LOSS, OPTIMIZER, 2)(state, batch, prox, ref)
    assert_close(optax.tree.get(state.opt_state, "mu"), alone[0])
    assert_close(metrics, alone[1])
    shardings = jax.tree.leaves(parameter_shardings(model, mesh))
    for leaf, sharding in zip(jax.tree.leaves(state.model), shardings, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert placed(model, mesh).layers.lora.q_b[...].sharding.spec[2] == "tensor"


@pytest.mark.long
def test_two_phases_make_the_update_of_one(build, model, alone):
    groups = build.groups(SIZES, seed=1)
    prompts = laid_out(groups, PHASES)
    completions, _ = pack_completions(groups, advantages_of(SIZES), prompts, PHASES, version=0)
    gradient, _, _ = first_step(model, completions, prompts=prompts)
    assert_close(gradient, alone[0])
