"""Properties of sampling while weights change: which keys stay, and which prompts are shared."""

from __future__ import annotations

import dataclasses
import functools
import random
import types

import jax
import numpy as np
import pytest

from models.sharding import MeshConfig, make_mesh
from rl_code.rollout.engine import Engine
from rl_code.rollout.page_pool import PagePool
from rl_code.rollout.scheduler import Scheduler
from rl_code.rollout.spans import Span
from tests.rl_code.rollout.small import (
    ENGINE,
    MODEL,
    SAMPLING,
    SCARCE,
    STOP,
    VOCAB,
    Episode,
    Letters,
    assert_all_free,
    assert_same,
    assert_trained_alike,
    engine_of,
    make_scheduler,
    model_on,
    play,
    task_of,
    trainer_logprobs,
)


def test_tasks_with_a_common_prefix_share_its_pages_under_the_same_weights_only():
    common = list(range(1, 13))
    tasks = [types.SimpleNamespace(id=f"task{i}", prompt=[*common, 20 + i, 3]) for i in range(3)]
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    scheduler = make_scheduler()
    once = functools.partial(Episode, turns=1)
    model = model_on(mesh)

    def prefilled(tasks, model):
        _, stats = scheduler.rollout(
            model, tasks, once, group_size=2, version=0, key=jax.random.key(0), first_group=0
        )
        return stats.prefilled_tokens

    assert prefilled(tasks[:1], model) == 13
    assert prefilled(tasks[1:2], model) == 1
    assert prefilled(tasks[2:], jax.tree.map(lambda x: x + 0, model)) == 13
    scheduler.close()
    apart, _ = play(tasks[2:], make=once, group_size=2)
    together, _ = play(tasks, make=once, group_size=2)
    for a, b in zip(apart[0].trajectories, together[2].trajectories, strict=True):
        assert a.sampled.sum() == b.sampled.sum()


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_in_the_middle_of_a_message_and_every_token_says_whose_it_is(recompute):
    scheduler = make_scheduler()
    mesh = scheduler.engine.mesh
    old = model_on(mesh)
    new = jax.tree.map(lambda x: -x, model_on(mesh))
    episodes = []

    def make(task, group, index):
        episodes.append(Episode(task, group, index, turns=1))
        return episodes[-1]

    scheduler.load(old, 3)
    scheduler.submit(task_of(1), make, group=0, group_size=3, key=(0, 7))
    scheduler.step()
    scheduler.load(new, 4, recompute=recompute)
    while scheduler.groups:
        scheduler.step()
    scheduler.close()
    seen = {tuple(episode.versions) for episode in episodes}
    assert all(list(versions) == sorted(versions) for versions in seen)
    assert {version for versions in seen for version in versions} == {3, 4}
    for episode in episodes:
        (logprobs,) = trainer_logprobs([episode.finish()], new)
        at = next(
            (
                i
                for i, (s, v) in enumerate(zip(episode.sampled, episode.all_versions, strict=True))
                if s and v == 4
            ),
            None,
        )
        if at is None:
            continue
        exact = np.allclose(logprobs[at - 1, episode.tokens[at]], episode.logprobs[at], rtol=1e-4)
        assert exact == recompute  # keys of the old weights are kept, or not


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """One that decodes, with few pages, and one that prefills on another device."""
    prefill, decode = (
        make_mesh(MeshConfig(data=1, tensor=1), [device]) for device in jax.devices()[:2]
    )
    return (
        Engine(MODEL, SCARCE, SAMPLING, (STOP,), decode),
        Engine(MODEL, ENGINE, SAMPLING, (STOP,), prefill),
    )


@pytest.fixture
def handed_over(engines):
    """A scheduler whose prompts are prefilled on other devices, with few pages where they are
    decoded.
    """
    decoder, prefiller = engines
    scheduler = Scheduler(
        decoder, Letters(), workers=4, worker_deadline_s=30.0, prefiller=prefiller
    )
    yield scheduler
    scheduler.close()


@pytest.mark.long
def test_prompts_that_wait_for_pages_to_be_handed_over_leave_no_page_behind(handed_over):
    tasks = [task_of(seed) for seed in range(5)]
    scarce, stats = play(tasks, scheduler=handed_over)
    assert stats.preempted
    assert_same(scarce, play(tasks)[0])
    assert_all_free(handed_over)


@pytest.mark.long
def test_a_prompt_that_waits_to_be_handed_over_is_computed_anew_with_new_weights(handed_over):
    mesh = handed_over.engine.mesh
    episodes = []
    new = jax.tree.map(lambda x: -x, model_on(mesh))

    def make(*which):
        episodes.append(Episode(*which, turns=2))
        return episodes[-1]

    handed_over.load(model_on(mesh), 0)
    for seed in range(5):
        handed_over.submit(task_of(seed), make, group=seed, group_size=4, key=(0, seed))
    while not any(group.saved for group in handed_over._open.prompts):
        assert handed_over.groups
        handed_over.step()
    handed_over.load(new, 1, recompute=True)
    while handed_over.groups:
        handed_over.step()
    assert_all_free(handed_over)
    late = [episode.finish() for episode in episodes if set(episode.versions) == {1}]
    assert late
    assert_trained_alike(late, MODEL, jax.device_put(new, jax.devices()[0]))


def test_a_new_group_shares_no_prompt_that_older_weights_computed():
    """Also not one that came back, with its keys kept, after its row had lost its pages."""
    common = types.SimpleNamespace(id="common", prompt=[*range(1, 14)])
    scheduler = make_scheduler(SCARCE)
    old = model_on(scheduler.engine.mesh)
    new = jax.tree.map(lambda x: -x, model_on(scheduler.engine.mesh))
    key = jax.random.key_data(jax.random.key(7)).tolist()
    scheduler.load(old, 0)
    scheduler.submit(common, Episode, group=0, group_size=4, key=key)
    while not any(row.saved for row in scheduler._open.rows):
        assert scheduler.groups
        scheduler.step()
    scheduler.load(new, 1)
    scheduler.submit(common, Episode, group=9, group_size=2, key=key, tag="new")
    finished = {}
    while scheduler.groups:
        finished |= scheduler.step()
    scheduler.close()
    fresh = make_scheduler(SCARCE)
    alone, _ = fresh.rollout(
        new, [common], Episode, group_size=2, version=1, key=jax.random.key(7), first_group=9
    )
    fresh.close()
    assert_same([finished["new"]], alone)


def test_a_prompt_that_lost_its_pages_half_written_is_not_found_by_others():
    tokens = [*range(1, 15)]
    pool = PagePool(engine_of(MODEL, ENGINE))
    model = pool.engine.own(model_on(pool.engine.mesh))
    first, second = (Span(tokens=list(tokens), prompt=len(tokens)) for _ in range(2))
    pool.restore(first)
    pool.prefill(model, [first])
    written = first.cached
    pool.save(first, on_device=False)
    pool.restore(first)
    pool.restore(second)
    assert second.cached == written == ENGINE.prefill_tokens
    for _ in range(3):
        pool.prefill(model, [first, second])
    third = Span(tokens=list(tokens), prompt=len(tokens))
    pool.restore(third)
    assert third.cached > written


@pytest.mark.long
def test_recomputed_keys_are_those_of_the_weights_that_sample_however_scarce_pages_are():
    scheduler = make_scheduler(dataclasses.replace(ENGINE, pages=22))
    plain = model_on(scheduler.engine.mesh)
    models = [jax.tree.map(lambda x, k=k: (-1) ** k * (1 + k / 10) * x, plain) for k in range(6)]
    preempted = 0
    for seed in (40, 76, 125, 193):
        rng = random.Random(seed)
        episodes = []

        def make(*which, episodes=episodes):
            episodes.append(Episode(*which))
            return episodes[-1]

        scheduler.load(models[0], 0)
        for group in range(rng.randint(1, 4)):
            prompt = np.random.default_rng([seed, group]).integers(1, VOCAB, rng.randint(10, 16))
            task = types.SimpleNamespace(id=str(group), prompt=prompt.tolist())
            scheduler.submit(task, make, group=group, group_size=rng.randint(1, 4), key=(seed, 7))
        version = 0
        while scheduler.groups:
            scheduler.step()
            if version < 5 and rng.random() < 0.6:
                version += 1
                scheduler.load(models[version], version, recompute=True)
        preempted += scheduler.take_stats().preempted
        trajectories = [episode.finish() for episode in episodes]
        for number in range(version + 1):
            logprobs = trainer_logprobs(trajectories, models[number])
            for row, t in zip(logprobs, trajectories, strict=True):
                at = np.flatnonzero(t.versions == number)
                np.testing.assert_allclose(
                    t.logprobs[at], row[at - 1, t.tokens[at]], rtol=1e-3, atol=1e-3
                )
    assert preempted
    scheduler.close()
