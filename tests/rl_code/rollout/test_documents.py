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
from rl_code.rollout.spans import Document
from tests.rl_code.rollout.small import (
    METHODS,
    MODEL,
    SAMPLING,
    STATELESS,
    STOP,
    Letters,
    make_scheduler,
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
OTHER = document(77, 13)
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
    attention, changes = METHODS["nsa and dense"]
    model = model_with(attention)
    engine = dataclasses.replace(WITH_DOCUMENTS, **changes)
    mesh = make_mesh(MeshConfig(data=2, tensor=2))
    scheduler = Scheduler(
        Engine(model, engine, SAMPLING, (STOP,), mesh), Letters(), workers=4, worker_deadline_s=30.0
    )
    make = functools.partial(DocumentEpisode, page=engine.page)
    groups, _ = play_documents(TASKS, scheduler=scheduler, model=model, make=make)
    scheduler.close()
    _assert_trained_alike(groups, model)


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.quick(first=1)
def test_a_documents_keys_depend_on_nothing_but_its_tokens(name):
    """Other documents, tokens before it and its own place change no bit on its pages."""
    attention, changes = METHODS[name]
    model = model_with(attention)
    engine = dataclasses.replace(WITH_DOCUMENTS, **changes)
    file = FILES[13]
    prompts = [
        [(file, True), ([5], False)],
        [([7, 8, 9], False), (FILES[8], True), (file, True), ([5], False)],
        [([7, 1, 9], False), (OTHER, True), (file, True), ([5], False)],
    ]
    kept = [_content(engine, model, prompt, file) for prompt in prompts]
    for x, y, z in zip(*kept, strict=True):
        assert x.any() and (x == y).all() and (x == z).all()


def _content(engine, model, prompt, file) -> list[np.ndarray]:
    """What the cache holds on the pages of a file once a prompt is prefilled."""
    scheduler = make_scheduler(engine, model)
    pool = scheduler._pool
    scheduler.load(model_on(scheduler.engine.mesh, model), 0)
    make = functools.partial(DocumentEpisode, page=engine.page)
    scheduler.submit(task_of("one", prompt, [[], []]), make, group=0, group_size=1, key=(0, 0))
    while not scheduler._open.rows:
        scheduler.step()
    wanted = Document(file, weights=pool._weights)
    pages = pool._documents[0].find(wanted.key, len(file))
    padded = pool._padded(0, pages, fill=0)
    content = [
        np.asarray(x)[: len(pages)] for x in scheduler.engine.read_pages(pool._cache(), padded)
    ]
    scheduler.abort()
    scheduler.close()
    if len(file) % engine.page:  # what stands behind the file's last token was never written
        last = len(file) % engine.page
        content = [x if x.ndim < 4 or x.shape[2] != engine.page else _cut(x, last) for x in content]
    return content


def _cut(x: np.ndarray, last: int) -> np.ndarray:
    """Pages [n, K, page, H] with zeros behind the ``last`` first tokens of the last one."""
    x = x.copy()
    x[-1, :, last:] = 0
    return x


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
