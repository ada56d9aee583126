"""Contexts with documents: sampled as trained, and keys of a document used again change no bit."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.cache import gathered
from attention.cache.paged import init_cache
from attention.methods.dense import Dense
from models.sharding import MeshConfig, make_mesh
from rl_code.rollout.decode_input import empty_input
from rl_code.rollout.engine import Engine
from rl_code.rollout.scheduler import Scheduler
from tests.rl_code.rollout.small import (
    METHODS,
    MODEL,
    SAMPLING,
    STATELESS,
    STOP,
    Letters,
    model_on,
    model_with,
    play,
    play_together_and_alone,
)
from tests.rl_code.rollout.with_documents import (
    WITH_DOCUMENTS,
    DocumentEpisode,
    document,
    task_of,
    trainer_logprobs,
)

# Shorter than a page of 4 or 8 tokens, exactly one, two, and longer.
FILES = {length: document(length, length) for length in (3, 4, 5, 8, 13)}
TASKS = [
    task_of(
        "both",
        [([7, 8, 9], False), (FILES[8], True), (FILES[13], True), ([11], False)],
        [[(FILES[5], True)], [([6, 6], False), (FILES[3], True), (FILES[13], True)]],
    ),
    task_of("none", [([7, 8, 9, 10], False)], [[], []]),
    task_of(
        "first", [(FILES[4], True), ([7, 8], False)], [[(FILES[13], True)], [(FILES[8], True)]]
    ),
]

# Pages, of each size, with which a group of four loses none.
FOR_ONE_GROUP = {4: 42, 8: 25}

play_documents = functools.partial(play, make=DocumentEpisode, engine=WITH_DOCUMENTS)


@pytest.mark.long
def test_log_probabilities_over_documents_are_those_of_the_trainer():
    groups, stats = play_documents(TASKS)
    _assert_trained_alike(groups, MODEL)
    assert stats.documents_found


def _assert_trained_alike(groups, config):
    model = model_on(make_mesh(MeshConfig(data=1, tensor=1)), config)
    trajectories = [t for group in groups for t in group.trajectories]
    for row, t in zip(trainer_logprobs(trajectories, model), trajectories, strict=True):
        predicted = row[np.arange(len(t.tokens) - 1), t.tokens[1:]]
        sampled = t.sampled[1:]
        np.testing.assert_allclose(
            t.logprobs[1:][sampled], predicted[sampled], rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.quick(first=1)
def test_every_method_samples_over_documents_what_the_trainer_computes(name):
    attention, changes = METHODS[name]
    model = model_with(attention)
    engine = dataclasses.replace(WITH_DOCUMENTS, **changes)
    make = functools.partial(DocumentEpisode, page=engine.page)
    engine = dataclasses.replace(engine, pages=FOR_ONE_GROUP[engine.page])
    together = play_together_and_alone(TASKS, engine=engine, model=model, make=make)
    _assert_trained_alike(together, model)


@pytest.mark.long
def test_a_mesh_of_rows_and_heads_samples_over_documents_what_the_trainer_computes():
    attention, changes = METHODS["nsa"]
    model = model_with((*attention, Dense()))
    engine = dataclasses.replace(WITH_DOCUMENTS, **changes)
    mesh = make_mesh(MeshConfig(data=2, tensor=2))
    scheduler = Scheduler(
        Engine(model, engine, SAMPLING, (STOP,), mesh), Letters(), workers=4, worker_deadline_s=30.0
    )
    make = functools.partial(DocumentEpisode, page=engine.page)
    groups, _ = play_documents(TASKS, scheduler=scheduler, model=model, make=make)
    scheduler.close()
    _assert_trained_alike(groups, model)


def test_an_empty_slot_computes_nothing_that_is_not_finite():
    config = WITH_DOCUMENTS
    slots = config.slots

    @jax.jit
    def attended(rows):
        cache = init_cache((Dense(),), config.pages, 1, 4, "float32", page=config.page)
        nothing = jnp.int32(0), jnp.zeros(slots, int)
        seen = gathered.gather(cache, 0, rows, config.view_block, *nothing)
        return gathered.attend(seen, rows, jnp.ones((slots, 1, 2, 4)), jnp.full((slots, 1), -1))

    out = attended(empty_input(config, 1).rows)
    assert np.isfinite(out).all()
