"""The engine samples what the trainer computes, whatever shares the batch."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
import types
import weakref

import jax
import numpy as np
import pytest

from attention.methods.dense import Dense
from attention.methods.gated_delta import GatedDelta
from attention.methods.moba import MoBA
from models.padding import pad, pad_config
from models.sharding import MeshConfig, make_mesh, parameter_shardings
from models.transformer import abstract_model
from rl_code.metrics.values import CompilationCounter
from rl_code.rollout.decoder import Decoder
from rl_code.rollout.engine import Engine
from rl_code.rollout.scheduler import Scheduler
from tests.rl_code.rollout.small import (
    ENGINE,
    FOR_ONE_GROUP,
    METHODS,
    MODEL,
    SAMPLING,
    SCARCE,
    STOP,
    VOCAB,
    Episode,
    Letters,
    Protocol,
    assert_near,
    assert_same,
    assert_trained_alike,
    initial,
    make_scheduler,
    model_on,
    model_with,
    play,
    play_together_and_alone,
    task_of,
)


def test_sampler_log_probabilities_equal_the_trainers():
    groups, stats = play([task_of(seed) for seed in range(3)])
    trajectories = [t for group in groups for t in group.trajectories]
    assert_trained_alike(trajectories, MODEL)
    assert stats.sampled_tokens == sum(t.sampled.sum() for t in trajectories)


def test_tokens_do_not_depend_on_what_else_is_in_the_batch():
    tasks = [task_of(seed) for seed in range(5)]
    together, _ = play(tasks)
    alone, _ = play(tasks[:1])
    assert_same(together[:1], alone)


@pytest.mark.long
def test_tokens_do_not_depend_on_shards_and_slots():
    tasks = [task_of(seed) for seed in range(5)]
    together, _ = play(tasks)
    wider, _ = play(
        tasks, engine=dataclasses.replace(ENGINE, slots=7, episodes=20, pages=200, view_block=16)
    )
    split, _ = play(tasks, shards=2)
    assert_same(split, together)
    for a, b in zip(wider, together, strict=True):  # other shapes may round otherwise
        assert all(
            (x.tokens == y.tokens).all()
            for x, y in zip(a.trajectories, b.trajectories, strict=True)
        )


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.quick(first=1)
def test_every_method_samples_what_the_trainer_computes_whatever_else_is_in_the_batch(name):
    attention, changes = METHODS[name]
    model = model_with(attention)
    engine = dataclasses.replace(ENGINE, **changes)
    engine = dataclasses.replace(engine, pages=FOR_ONE_GROUP // engine.page)
    tasks = [task_of(seed) for seed in range(3)]
    together = play_together_and_alone(tasks, engine=engine, model=model)
    assert_trained_alike([t for group in together for t in group.trajectories], model)


@pytest.mark.long
def test_what_a_group_held_is_freed_once_it_ends_or_is_given_up():
    """In a server garbage is collected seldom, and all that was answered till then would stay."""
    scheduler = make_scheduler()
    episodes = weakref.WeakSet()

    def make(*arguments):
        episodes.add(made := Episode(*arguments))
        return made

    def wait_none_left() -> None:
        end = time.monotonic() + 60.0
        while episodes and time.monotonic() < end:  # a worker may be about to let go of one
            time.sleep(0.01)
        assert not episodes

    gc.collect()
    gc.disable()
    try:
        play([task_of(seed) for seed in range(3)], make=make, scheduler=scheduler)
        wait_none_left()
        way = dict(group=0, group_size=3, key=(1, 2), tag="given up")
        scheduler.submit(task_of(0), make, **way)
        scheduler.step()
        assert len(episodes) == 3
        scheduler.give_up("given up")
        wait_none_left()
    finally:
        gc.enable()
        scheduler.close()


def test_statistics_are_taken_without_a_program_on_the_cache(monkeypatch):
    """The learner's thread takes them at any moment, also while the actor's is giving the cache to
    a program.
    """
    scheduler = make_scheduler()
    fork = scheduler._pool.fork
    run = Engine._run
    taken = []
    counting = []

    def fork_and_count(*spans):
        fork(*spans)  # a page is to be copied now
        counting.append(True)
        taken.append(scheduler.take_stats().kv_bytes)
        counting.clear()

    def watched(*arguments):
        assert not counting, "counting ran a program"
        return run(*arguments)

    monkeypatch.setattr(scheduler._pool, "fork", fork_and_count)
    monkeypatch.setattr(Engine, "_run", watched)
    play([task_of(seed) for seed in range(3)], scheduler=scheduler)
    scheduler.close()
    assert len(taken) == 12 and max(taken) > 0


def test_running_out_of_pages_changes_no_token():
    tasks = [task_of(seed) for seed in range(5)]
    plenty, _ = play(tasks)
    scarce, stats = play(tasks, engine=SCARCE)
    assert stats.preempted > 5
    assert_same(scarce, plenty)


@pytest.mark.long
def test_short_answers_of_tools_have_a_shape_of_their_own_that_changes_no_token():
    tasks = [task_of(seed) for seed in range(5)]
    # some answers are longer
    shapes = dict(result_rows=3, result_tokens=5)
    engine = dataclasses.replace(ENGINE, **shapes, pages=FOR_ONE_GROUP // ENGINE.page)
    together = play_together_and_alone(tasks, engine=engine)
    # Programs of other shapes round alike on some processors (AVX-512) and not on others (AVX2).
    assert_near(together, play(tasks)[0])


def test_a_cache_that_cannot_hold_one_trajectory_is_refused():
    with pytest.raises(
        ValueError, match=r"pages=16 of 4 tokens must hold length=64 tokens and one page more"
    ):
        dataclasses.replace(ENGINE, pages=16)


@pytest.mark.long
def test_prompts_prefilled_on_other_devices_give_the_same_samples():
    devices = jax.devices()
    tasks = [task_of(seed) for seed in range(5)]
    together, _ = play(tasks)
    prefill = make_mesh(MeshConfig(data=1, tensor=1), devices[:1])
    decode = make_mesh(MeshConfig(data=2, tensor=1), devices[1:3])
    scheduler = Scheduler(
        Engine(MODEL, ENGINE, SAMPLING, (STOP,), decode),
        Letters(),
        workers=4,
        worker_deadline_s=30.0,
        prefiller=Engine(MODEL, ENGINE, SAMPLING, (STOP,), prefill),
    )
    apart, stats = play(tasks, scheduler=scheduler)
    scheduler.close()
    assert_same(apart, together)
    assert stats.prefix_hit_rate > 0.5


@pytest.mark.long
def test_padded_heads_sample_what_the_model_itself_does():
    """Six query heads and two key/value heads on four devices, which share every layer."""
    methods = (MoBA(block=4, picks=3), Dense())
    odd = dict(num_heads=6, mlp_dim=30, vocab_size=VOCAB + 1)
    config = dataclasses.replace(MODEL, num_layers=len(methods), attention=methods, **odd)
    padded = pad_config(config, 4)
    itself = initial(config)
    like = abstract_model(padded)

    def played(model, where):
        mesh = make_mesh(where)
        engine = Engine(model.config, ENGINE, SAMPLING, (STOP,), mesh)
        scheduler = Scheduler(engine, Letters(), workers=4, worker_deadline_s=30.0)
        model = jax.device_put(model, parameter_shardings(model, mesh))
        tasks = [task_of(seed) for seed in range(3)]
        once = functools.partial(Episode, turns=2)
        groups, _ = scheduler.rollout(
            model, tasks, once, group_size=2, version=1, key=jax.random.key(7)
        )
        scheduler.close()
        return [t for group in groups for t in group.trajectories]

    larger = jax.jit(lambda x: pad(x, like))(itself)
    shared, alone = (
        played(model, MeshConfig(data=1, tensor=devices))
        for model, devices in ((larger, 4), (itself, 1))
    )
    assert any(len(set(t.tokens[t.sampled])) > 2 for t in alone)
    for one, other in zip(shared, alone, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("decoding", "chunks"), [(1, 4), (3, 1)])
def test_a_long_prompt_does_not_hold_up_the_others(decoding, chunks):
    """Few chunks of 4 tokens between two dispatches while slots are free, one while nearly none
    is.
    """
    scheduler = make_scheduler(dataclasses.replace(ENGINE, decode_steps=1, prompt_length=48))
    scheduler.load(model_on(scheduler.engine.mesh), 0)
    once = functools.partial(Episode, turns=1)
    short, long = (types.SimpleNamespace(id=f"{count}", prompt=[2] * count) for count in (3, 42))
    scheduler.submit(short, once, group=0, group_size=decoding, key=(0, 0))
    scheduler.step()
    scheduler.submit(long, once, group=1, group_size=1, key=(0, 0))
    scheduler.take_stats()
    for _ in range(2):
        scheduler.step()
        stats = scheduler.take_stats()
        assert stats.prefilled_tokens == 4 * chunks
        assert stats.sampled_tokens == decoding
    while scheduler.groups:
        scheduler.step()
    scheduler.close()


def test_samples_of_a_group_differ_and_keep_their_order():
    (group,), _ = play([task_of(1)], group_size=6)
    assert [t.index for t in group.trajectories] == list(range(6))
    assert len({tuple(t.tokens) for t in group.trajectories}) > 1


def test_a_prompt_is_prefilled_once_for_its_group():
    task = task_of(8)
    _, one = play([task], group_size=1, make=lambda *a: Episode(*a, turns=1))
    _, many = play([task], group_size=6, make=lambda *a: Episode(*a, turns=1))
    assert one.prefilled_tokens == many.prefilled_tokens == len(task.prompt) - 1
    assert many.needed_tokens == 6 * (len(task.prompt) - 1)
    assert many.found_in_groups == 5 * (len(task.prompt) - 1)


def test_what_is_found_in_the_cache_is_what_is_not_prefilled():
    # the last begins with the pages of the one before
    tasks = [task_of(seed) for seed in (0, 8, 8)]
    scheduler = make_scheduler()
    model = model_on(scheduler.engine.mesh)
    way = dict(group_size=4, version=1, key=jax.random.key(7))
    for number, task in enumerate(tasks):
        groups, stats = scheduler.rollout(model, [task], Episode, **way)
        found = (stats.found_in_tasks, stats.found_in_groups, stats.found_in_turns)
        assert stats.prefilled_tokens + sum(found) == stats.needed_tokens
        assert stats.prefix_hit_rate == sum(found) / stats.needed_tokens
        assert found[:2] == (8 if number == 2 else 0, 3 * (len(task.prompt) - 1))
        # a context is kept but for the token that was sampled last
        turns = [
            np.flatnonzero(np.diff(t.sampled.astype(int)) == -1) for t in groups[0].trajectories
        ]
        assert found[2] == sum(ends[:2].sum() for ends in turns)
    scheduler.close()


@pytest.mark.long
def test_occupancy_is_the_share_of_slots_that_gain_a_token():
    _, stats = play([task_of(1)], group_size=1)
    assert stats.occupancy == pytest.approx(1 / ENGINE.slots)
    _, stats = play([task_of(1)], group_size=1, shards=2)
    assert stats.occupancy == pytest.approx(1 / (2 * ENGINE.slots))


def test_nothing_is_compiled_after_the_first_rollout():
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    fresh = Engine(MODEL, ENGINE, SAMPLING, (STOP,), mesh)  # the tests' own has been used
    scheduler = Scheduler(fresh, Letters(), workers=4, worker_deadline_s=30.0)
    play([task_of(0), task_of(7)], scheduler=scheduler)
    model_on(mesh)  # what the test itself compiles
    with CompilationCounter() as compilations:
        play([task_of(seed) for seed in range(1, 6)], scheduler=scheduler)
    scheduler.close()
    assert compilations.count == 0


def test_a_rule_on_text_cuts_the_message_at_the_token_that_triggers_it():
    groups, _ = play(
        [task_of(2), task_of(3)], make=lambda *a: Episode(*a, protocol=Protocol(rule=True))
    )
    plain, _ = play([task_of(2), task_of(3)])
    for group, other in zip(groups, plain, strict=True):
        for t, p in zip(group.trajectories, other.trajectories, strict=True):
            start = len(group.task.prompt)
            first = _first_message(t, start)
            whole = _first_message(p, start)
            assert 7 not in first[:-1]
            assert whole[: len(first)] == first


@pytest.mark.long
def test_what_a_rule_on_text_cuts_off_overwrites_nothing_that_is_still_needed():
    """A state, and the ring of NSA's raw keys, of which the next compressed key is made."""
    (nsa, _), changes = METHODS["nsa and dense"]
    model = model_with((nsa, GatedDelta()))
    groups, _ = play(
        [task_of(seed) for seed in range(6, 14)],
        engine=dataclasses.replace(ENGINE, **changes, prefill_tokens=8, decode_steps=7),
        model=model,
        make=lambda *a: Episode(*a, protocol=Protocol(rule=True)),
    )
    trajectories = [t for group in groups for t in group.trajectories]
    assert any(7 in t.tokens[t.prompt_length :] for t in trajectories)
    assert_trained_alike(trajectories, model)


def test_a_message_has_the_same_bits_however_far_its_dispatches_go(monkeypatch):
    """Behind each message a row goes back to the state of a page, wherever it was cut."""
    model = dataclasses.replace(MODEL, attention=METHODS["states and dense"][0])
    tasks = [task_of(seed) for seed in range(6, 10)]
    make = functools.partial(Episode, protocol=Protocol(rule=True))
    one, _ = play(tasks, model=model, make=make)
    budget = Decoder._budget
    monkeypatch.setattr(Decoder, "_budget", lambda self, row: min(budget(self, row), 2))
    other, _ = play(tasks, model=model, make=make)
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a.trajectories, b.trajectories, strict=True):
            np.testing.assert_array_equal(x.tokens, y.tokens)
            np.testing.assert_array_equal(x.logprobs, y.logprobs)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(draft_tokens=2), "draft_tokens=2: a state cannot take guessed tokens back"),
        (dict(page=32, view_block=32, prefill_tokens=16), "prefill_tokens=16 must be a multiple"),
    ],
)
def test_settings_that_states_do_not_have_are_refused(change, message):
    model = dataclasses.replace(MODEL, attention=METHODS["states and dense"][0])
    with pytest.raises(ValueError, match=message):
        make_scheduler(dataclasses.replace(ENGINE, **change), model)


def _first_message(trajectory, start: int) -> list[int]:
    end = start
    while end < len(trajectory.tokens) and trajectory.sampled[end]:
        end += 1
    return trajectory.tokens[start:end].tolist()


def test_a_prompt_that_is_too_long_is_named():
    task = types.SimpleNamespace(id="long", prompt=[1] * 17)
    with pytest.raises(ValueError, match=r"long.*17.*prompt_length=16"):
        play([task])
