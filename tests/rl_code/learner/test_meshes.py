"""Updates on every mesh of eight devices are those of one device: metrics, loss and gradients.

Not every method and feed-forward part is tried on every mesh, but every two axes with each of them
(``tests.meshes.CASES``).
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from models.sharding import make_mesh, parameter_shardings, partition_spec
from rl_code.learner.batching import pack
from rl_code.learner.update import init_state
from tests.meshes import CASES, MESHES, METHODS, model_options
from tests.rl_code.learner import test_documents
from tests.rl_code.learner.conftest import make_group, make_model, make_turns
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

# The groups of a batch with documents, one in each row, and its shapes.
DOCUMENT_SIZES = (2, 1, 2, 1, 2, 2, 1, 2)
WITH_DOCUMENTS = dataclasses.replace(test_documents.PACK, rows=8)


@functools.cache
def batch_of(methods: str, parts: int):
    """(batch, most runs of a row). No document lies on two of ``parts`` devices."""
    if methods == "documents":
        builders = types.SimpleNamespace(group=make_group)
        groups = test_documents.make_groups(builders, DOCUMENT_SIZES)
        config = dataclasses.replace(WITH_DOCUMENTS, parts=parts)
        batch, metrics = pack(groups, advantages_of(DOCUMENT_SIZES), config, version=0)
        assert not metrics.get("pack/documents_cut")
        return batch, config.runs
    return pack(make_turns(SIZES), advantages_of(SIZES), ONE, version=0)[0], ONE.runs


@functools.cache
def alone(methods: str, **options):
    """(gradient, metrics) of an update on one device."""
    batch, runs = batch_of(methods, 1)
    gradient, metrics, _ = first_step(make_model(**options), batch, runs=runs)
    return jax.device_get((gradient, metrics))


def on_mesh(model, mesh):
    """A copy of a model, cut over a mesh."""
    return jax.device_put(fresh(model), parameter_shardings(model, mesh))


# In float64: gradients of decays are small differences of large sums.
WIDE = dict(dtype="float64", param_dtype="float64")


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data 2 x fsdp 2 x tensor 2", "fsdp 2 x context 2 x tensor 2"])
def test_layers_with_a_state_are_updated_as_on_one_device(x64, mesh):
    check(mesh, "states", "plain", **WIDE)


@pytest.mark.long
def test_layers_with_latent_vectors_and_an_indexer_are_updated_as_on_one_device():
    """Heads are cut, tokens are, and parameters. The indexer's divergence sums weights of heads
    that are cut, and its layer is shared.
    """
    attention = METHODS["latent"] + METHODS["chosen"]
    layers = dict(attention=attention, num_layers=len(attention))
    check("fsdp 2 x context 2 x tensor 2", "chosen", "plain", **layers)


@pytest.mark.slow(reason="compiles for half an hour")
@pytest.mark.parametrize(
    "mesh, methods, feed_forward", [case for case in CASES if case[1] == "states"]
)
def test_every_mesh_updates_layers_with_a_state(x64, mesh, methods, feed_forward):
    check(mesh, methods, feed_forward, **WIDE)


@pytest.mark.slow(reason="compiles for half an hour")
@pytest.mark.parametrize(
    "mesh, methods, feed_forward", [case for case in CASES if case[1] != "states"]
)
def test_updates_are_those_of_one_device(mesh, methods, feed_forward):
    check(mesh, methods, feed_forward)


def check(mesh: str, methods: str, feed_forward: str, **more: Any) -> None:
    """Raises AssertionError where a mesh makes another update than one device."""
    options = model_options(mesh, methods, feed_forward) | more
    model = make_model(**options)
    config = MESHES[mesh]
    batch, runs = batch_of(methods, config.context)
    devices = make_mesh(config)
    placed = on_mesh(model, devices)
    with jax.set_mesh(devices):
        state = init_state(placed, OPTIMIZER)
        rows = jax.device_put(batch, NamedSharding(devices, partition_spec(("batch",))))
        ref = batch.logprobs - 0.2 * np.sin(batch.targets)
        prox = batch.logprobs + 0.1 * np.cos(batch.targets)
        micro_batches = 1 if config.row_shards == 8 else 2
        update = update_for(LOSS, OPTIMIZER, micro_batches, runs)
        state, found = jax.device_get(update(state, rows, prox, ref))
    gradient, metrics = alone(methods, **options)
    assert_close(optax.tree.get(state.opt_state, "mu"), gradient)
    assert_close(found, metrics)
