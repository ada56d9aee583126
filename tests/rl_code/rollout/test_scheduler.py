"""The engine samples what the trainer computes, whatever shares the batch; tools never hold up the other rows."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.methods import Dense, Window
from attention.moba import MoBA
from attention.nsa import NSA
from attention.squid import GatedDocuments
from models.sharding import MeshConfig, make_mesh
from pallas_kernels.tokens import packed_rows
from rl_code.metrics import CompilationCounter
from rl_code.rollout.engine import Engine
from rl_code.rollout.scheduler import RolloutTimeout, Scheduler
from tests.rl_code.rollout.small import (
    ENGINE,
    MODEL,
    SAMPLING,
    SCARCE,
    STOP,
    Episode,
    Letters,
    Protocol,
    assert_same,
    make_scheduler,
    model_on,
    play,
    task_of,
)


def test_sampler_log_probabilities_equal_the_trainers():
    groups, stats = play([task_of(seed) for seed in range(3)])
    trajectories = [t for group in groups for t in group.trajectories]
    _assert_trained_alike(trajectories, MODEL)
    assert stats.sampled_tokens == sum(t.sampled.sum() for t in trajectories)


def _assert_trained_alike(trajectories, config):
    model = model_on(make_mesh(MeshConfig(data=1, tensor=1)), config)
    for row, t in zip(_trainer_logprobs(trajectories, model), trajectories, strict=True):
        predicted = row[np.arange(len(t.tokens) - 1), t.tokens[1:]]
        np.testing.assert_allclose(t.logprobs[1:][t.sampled[1:]], predicted[t.sampled[1:]], rtol=1e-3, atol=1e-4)


def _trainer_logprobs(trajectories, model):
    tokens = np.zeros((len(trajectories), ENGINE.length), np.int32)
    for row, t in zip(tokens, trajectories, strict=True):
        row[: len(t.tokens)] = t.tokens

    @jax.jit
    def trainer(model, tokens):
        ones = jnp.ones_like(tokens)
        positions = jnp.cumsum(ones, axis=1) - 1
        hidden = model.hidden(tokens, positions, packed_rows(ones, 0 * ones, positions))
        return jax.nn.log_softmax(model.logits(hidden))

    return np.asarray(trainer(model, tokens))


def test_tokens_do_not_depend_on_what_else_is_in_the_batch():
    tasks = [task_of(seed) for seed in range(5)]
    together, _ = play(tasks)
    alone, _ = play(tasks[:1])
    wider, _ = play(tasks, engine=dataclasses.replace(ENGINE, slots=7, episodes=20, pages=200, view_block=32))
    split, _ = play(tasks, shards=2)
    for a, b in zip(together[0].trajectories, alone[0].trajectories, strict=True):
        assert (a.tokens == b.tokens).all()
        assert (a.logprobs == b.logprobs).all()
    assert_same(split, together)
    for a, b in zip(wider, together, strict=True):  # other shapes may round otherwise
        assert all((x.tokens == y.tokens).all() for x, y in zip(a.trajectories, b.trajectories, strict=True))


METHODS = {
    "dense from pages": ((Dense(),), dict(decode="pages")),
    "window": ((Window(6),), {}),
    "moba": ((MoBA(block=4, picks=2),), {}),
    "nsa": ((NSA(block=8, length=4, stride=4, picks=3, window=8),), dict(page=8)),
    "squid": ((GatedDocuments(),), {}),
    "dense and nsa": ((Dense(), NSA(block=8, length=4, stride=4, picks=3, window=8)), dict(page=8)),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_samples_what_the_trainer_computes_whatever_else_is_in_the_batch(name):
    attention, changes = METHODS[name]
    model, engine = dataclasses.replace(MODEL, attention=attention), dataclasses.replace(ENGINE, **changes)
    tasks = [task_of(seed) for seed in range(3)]
    together, _ = play(tasks, engine=engine, model=model)
    alone, _ = play(tasks[:1], engine=engine, model=model)
    scarce, stats = play(tasks, engine=dataclasses.replace(engine, pages=72 // engine.page), model=model)
    for a, b in zip(together[0].trajectories, alone[0].trajectories, strict=True):
        assert (a.tokens == b.tokens).all() and (a.logprobs == b.logprobs).all()
    assert stats.preempted
    assert_same(scarce, together)
    _assert_trained_alike([t for group in together for t in group.trajectories], model)


def test_statistics_are_taken_without_a_program_on_the_cache(monkeypatch):
    """The learner's thread takes them at any moment, also while the actor's is giving the cache to a program."""
    scheduler = make_scheduler()
    fork, run, taken, counting = scheduler._pool.fork, Engine._run, [], []

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


def test_short_answers_of_tools_have_a_shape_of_their_own_that_changes_no_token():
    tasks = [task_of(seed) for seed in range(5)]
    engine = dataclasses.replace(ENGINE, answer_rows=3, answer_tokens=5)  # some answers are longer
    together, _ = play(tasks, engine=engine)
    alone, _ = play(tasks[:1], engine=engine)
    scarce, stats = play(tasks, engine=dataclasses.replace(engine, pages=SCARCE.pages))
    assert stats.preempted > 5
    assert_same(together[:1], alone)
    assert_same(together, scarce)
    assert_same(together, play(tasks)[0])


def test_a_cache_that_cannot_hold_one_trajectory_is_refused():
    with pytest.raises(ValueError, match=r"pages=16 of 4 tokens must hold length=64 tokens and one page more"):
        dataclasses.replace(ENGINE, pages=16)


def test_prompts_prefilled_on_other_devices_give_the_same_samples():
    devices, tasks = jax.devices(), [task_of(seed) for seed in range(5)]
    together, _ = play(tasks)
    for decoders in (1, 2):
        prefill = make_mesh(MeshConfig(data=1, tensor=1), devices[:1])
        decode = make_mesh(MeshConfig(data=decoders, tensor=1), devices[1 : 1 + decoders])
        scheduler = Scheduler(
            Engine(MODEL, ENGINE, SAMPLING, (STOP,), decode),
            Letters(),
            workers=4,
            tool_timeout_s=30.0,
            prefiller=Engine(MODEL, ENGINE, SAMPLING, (STOP,), prefill),
        )
        apart, stats = scheduler.rollout(
            model_on(decode), tasks, Episode, group_size=4, version=1, key=jax.random.key(7)
        )
        scheduler.close()
        assert_same(apart, together)
        assert stats.prefix_hit_rate > 0.5


def test_tasks_with_a_common_prefix_share_its_pages_under_the_same_weights_only():
    common = list(range(1, 13))
    tasks = [types.SimpleNamespace(id=f"task{i}", prompt=[*common, 20 + i, 3]) for i in range(3)]
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    scheduler = make_scheduler()
    once = functools.partial(Episode, turns=1)
    model = model_on(mesh)

    def prefilled(tasks, model):
        _, stats = scheduler.rollout(model, tasks, once, group_size=2, version=0, key=jax.random.key(0), first_group=0)
        return stats.prefilled_tokens

    assert prefilled(tasks[:1], model) == 13
    assert prefilled(tasks[1:2], model) == 1
    assert prefilled(tasks[2:], jax.tree.map(lambda x: x + 0, model)) == 13
    scheduler.close()
    apart, _ = play(tasks[2:], make=once, group_size=2)
    together, _ = play(tasks, make=once, group_size=2)
    for a, b in zip(apart[0].trajectories, together[2].trajectories, strict=True):
        assert a.sampled.sum() == b.sampled.sum()


def test_a_long_prompt_does_not_hold_up_the_others():
    scheduler = make_scheduler(dataclasses.replace(ENGINE, episodes=8))
    scheduler.load(model_on(scheduler.engine.mesh), 0)
    short, long = task_of(0), types.SimpleNamespace(id="long", prompt=[2] * 16)
    scheduler.submit(short, functools.partial(Episode, turns=1), group=0, group_size=1, key=(0, 0))
    scheduler.step()
    scheduler.submit(long, functools.partial(Episode, turns=1), group=1, group_size=1, key=(0, 0))
    before = scheduler.stats.sampled_tokens
    scheduler.step()  # one chunk of four of the long prompt's tokens, and a dispatch for the short one
    assert scheduler.stats.prefilled_tokens < len(short.prompt) + 15
    assert scheduler.stats.sampled_tokens > before
    while scheduler.groups:
        scheduler.step()
    scheduler.close()


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_in_the_middle_of_a_message_and_every_token_says_whose_it_is(recompute):
    scheduler = make_scheduler(dataclasses.replace(ENGINE, decode_steps=2))
    mesh = scheduler.engine.mesh
    old, new = model_on(mesh), jax.tree.map(lambda x: -x, model_on(mesh))
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
        (logprobs,) = _trainer_logprobs([episode.finish()], new)
        at = next(
            (i for i, (s, v) in enumerate(zip(episode.sampled, episode.all_versions, strict=True)) if s and v == 4),
            None,
        )
        if at is None:
            continue
        exact = np.allclose(logprobs[at - 1, episode.tokens[at]], episode.logprobs[at], rtol=1e-4)
        assert exact == recompute  # keys of the old weights are kept, or not


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


def test_nothing_is_compiled_after_the_first_rollout():
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    fresh = Engine(MODEL, ENGINE, SAMPLING, (STOP,), mesh)  # the tests' own has been used
    scheduler = Scheduler(fresh, Letters(), workers=4, tool_timeout_s=30.0)
    play([task_of(0), task_of(7)], scheduler=scheduler)
    model_on(mesh)  # what the test itself compiles
    with CompilationCounter() as compilations:
        play([task_of(seed) for seed in range(1, 6)], scheduler=scheduler)
    scheduler.close()
    assert compilations.count == 0


def test_a_rule_on_text_cuts_the_message_at_the_token_that_triggers_it():
    groups, _ = play([task_of(2), task_of(3)], make=lambda *a: Episode(*a, protocol=Protocol(rule=True)))
    plain, _ = play([task_of(2), task_of(3)])
    for group, other in zip(groups, plain, strict=True):
        for t, p in zip(group.trajectories, other.trajectories, strict=True):
            start = len(group.task.prompt)
            first, whole = _first_message(t, start), _first_message(p, start)
            assert 7 not in first[:-1]
            assert whole[: len(first)] == first


def _first_message(trajectory, start: int) -> list[int]:
    end = start
    while end < len(trajectory.tokens) and trajectory.sampled[end]:
        end += 1
    return trajectory.tokens[start:end].tolist()


def test_decoding_goes_on_while_one_tool_is_slow():
    release = threading.Event()
    finished = []

    def make(task, group, index):
        return Episode(task, group, index, wait=(lambda: release.wait(20)) if (group, index) == (0, 0) else None)

    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    scheduler = make_scheduler()

    def on_finished(trajectory):
        finished.append((trajectory.group, trajectory.index))
        if len(finished) == 7:  # everybody but the slow one
            release.set()

    tasks = [task_of(0), task_of(1)]
    scheduler.rollout(
        model_on(mesh), tasks, make, group_size=4, version=0, key=jax.random.key(0), on_finished=on_finished
    )
    scheduler.close()
    assert finished[-1] == (0, 0)


def test_a_tool_that_never_answers_is_named():
    release = threading.Event()
    episodes = []

    def make(task, group, index):
        episodes.append(Episode(task, group, index, wait=lambda: release.wait(20)))
        return episodes[-1]

    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    scheduler = make_scheduler(timeout_s=0.3)
    with pytest.raises(RolloutTimeout, match="task5"):
        scheduler.rollout(model_on(mesh), [task_of(5)], make, group_size=2, version=0, key=jax.random.key(0))
    release.set()
    scheduler.close()
    assert all(episode.closed for episode in episodes)


def test_a_prompt_that_is_too_long_is_named():
    task = types.SimpleNamespace(id="long", prompt=[1] * 17)
    with pytest.raises(ValueError, match=r"long.*17.*prompt_length=16"):
        play([task])
