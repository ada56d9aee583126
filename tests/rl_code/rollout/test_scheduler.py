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
from flax import nnx

from attention.methods import Dense, Window
from attention.moba import MoBA
from attention.nsa import NSA
from attention.squid import GatedDocuments
from models.sharding import MeshConfig, make_mesh, parameter_shardings
from models.transformer import ModelConfig, Transformer
from pallas_kernels.tokens import packed_rows
from rl_code.metrics import CompilationCounter
from rl_code.rollout.engine import Engine, EngineConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import RolloutTimeout, Scheduler

STOP, VOCAB = 0, 40
MODEL = ModelConfig(
    vocab_size=VOCAB,
    embed_dim=32,
    mlp_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
)
ENGINE = EngineConfig(
    slots=3,
    episodes=8,
    page=4,
    pages=64,
    prefill_rows=2,
    prefill_tokens=4,
    prompt_length=16,
    length=64,
    decode_steps=5,
    cache_dtype="float32",
    view_block=8,
    tile=3,
)
SAMPLING = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0)


class _Letters:
    """A tokenizer of one character per token."""

    def decode(self, tokens):
        return "".join(chr(65 + token) for token in tokens)

    def token_id(self, text):
        return STOP


class _Protocol:
    """Ends a message at the stop token or, where ``rule`` is set, at the first token 7."""

    stop_tokens = ("stop",)

    def __init__(self, rule=False):
        self.rule = rule

    def stopped(self, text):
        return self.rule and chr(65 + 7) in text


class _Episode:
    """Answers every message with its own tokens turned around; over after ``turns`` messages."""

    def __init__(self, task, group, index, turns=3, protocol=None, wait=None):
        self.task, self.group, self.index, self.turns = task, group, index, turns
        self.protocol = protocol or _Protocol()
        self.tokens, self.sampled, self.logprobs, self.versions, self.messages = [], [], [], [], 0
        self.wait, self.closed = wait, False

    @property
    def budget(self):
        return min(7, 60 - len(self.tokens))

    def start(self):
        self.tokens = list(self.task.prompt)
        self.sampled, self.logprobs = [False] * len(self.tokens), [0.0] * len(self.tokens)
        return list(self.tokens)

    def step(self, tokens, logprobs, versions):
        if self.wait is not None:
            self.wait()
        assert 0 < len(tokens) <= self.budget
        assert STOP not in tokens[:-1]
        self._add(tokens, logprobs, True)
        self.versions += versions
        self.messages += 1
        if self.messages == self.turns:
            return None
        answer = [STOP, *reversed(tokens)]
        self._add(answer, [0.0] * len(answer), False)
        return answer

    def _add(self, tokens, logprobs, sampled):
        self.tokens += tokens
        self.logprobs += logprobs
        self.sampled += [sampled] * len(tokens)

    def finish(self):
        return types.SimpleNamespace(
            index=self.index,
            group=self.group,
            tokens=np.array(self.tokens),
            sampled=np.array(self.sampled),
            logprobs=np.array(self.logprobs),
        )

    def close(self):
        self.closed = True

    @property
    def all_versions(self):
        given = iter(self.versions)
        return [next(given) if sampled else -1 for sampled in self.sampled]


def _task(seed: int):
    prompt = np.random.default_rng(seed).integers(1, VOCAB, 3 + seed % 9)
    return types.SimpleNamespace(id=f"task{seed}", prompt=prompt.tolist())


def _model(mesh, config=MODEL) -> Transformer:
    return jax.device_put(_initial(config), parameter_shardings(_initial(config), mesh))


@functools.cache
def _initial(config) -> Transformer:
    """Larger weights than at initialisation, so that the distribution depends on the context."""
    return jax.jit(lambda: jax.tree.map(lambda x: 3.0 * x, Transformer(config, nnx.Rngs(0))))()


def _scheduler(engine=ENGINE, model=MODEL, shards=1, timeout_s=30.0) -> Scheduler:
    mesh = make_mesh(MeshConfig(data=shards, tensor=1))
    return Scheduler(Engine(model, engine, SAMPLING, (STOP,), mesh), _Letters(), workers=4, tool_timeout_s=timeout_s)


def _play(tasks, *, group_size=4, shards=1, make=_Episode, engine=ENGINE, model=MODEL, scheduler=None):
    own = scheduler or _scheduler(engine, model, shards)
    try:
        weights = _model(own.engine.mesh, model)
        return own.rollout(weights, tasks, make, group_size=group_size, version=1, key=jax.random.key(7))
    finally:
        if scheduler is None:
            own.close()


def test_sampler_log_probabilities_equal_the_trainers():
    groups, stats = _play([_task(seed) for seed in range(3)])
    trajectories = [t for group in groups for t in group.trajectories]
    _assert_trained_alike(trajectories, MODEL)
    assert stats.sampled_tokens == sum(t.sampled.sum() for t in trajectories)


def _assert_trained_alike(trajectories, config):
    model = _model(make_mesh(MeshConfig(data=1, tensor=1)), config)
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


def _assert_same(these, those):
    for a, b in zip(these, those, strict=True):
        for x, y in zip(a.trajectories, b.trajectories, strict=True):
            assert (x.tokens == y.tokens).all() and (x.logprobs == y.logprobs).all()


def test_tokens_do_not_depend_on_what_else_is_in_the_batch():
    tasks = [_task(seed) for seed in range(5)]
    together, _ = _play(tasks)
    alone, _ = _play(tasks[:1])
    wider, _ = _play(tasks, engine=dataclasses.replace(ENGINE, slots=7, episodes=20, pages=200, view_block=32))
    split, _ = _play(tasks, shards=2)
    for a, b in zip(together[0].trajectories, alone[0].trajectories, strict=True):
        assert (a.tokens == b.tokens).all()
        assert (a.logprobs == b.logprobs).all()
    _assert_same(split, together)
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
    tasks = [_task(seed) for seed in range(3)]
    together, _ = _play(tasks, engine=engine, model=model)
    alone, _ = _play(tasks[:1], engine=engine, model=model)
    scarce, stats = _play(tasks, engine=dataclasses.replace(engine, pages=72 // engine.page), model=model)
    for a, b in zip(together[0].trajectories, alone[0].trajectories, strict=True):
        assert (a.tokens == b.tokens).all() and (a.logprobs == b.logprobs).all()
    assert stats.preempted
    _assert_same(scarce, together)
    _assert_trained_alike([t for group in together for t in group.trajectories], model)


def test_running_out_of_pages_changes_no_token():
    tasks = [_task(seed) for seed in range(5)]
    plenty, _ = _play(tasks)
    scarce, stats = _play(tasks, engine=dataclasses.replace(ENGINE, pages=18))
    assert stats.preempted > 5
    _assert_same(scarce, plenty)


def test_a_cache_that_cannot_hold_one_trajectory_is_refused():
    with pytest.raises(ValueError, match=r"pages=16 of 4 tokens must hold length=64 tokens and one page more"):
        dataclasses.replace(ENGINE, pages=16)


def test_prompts_prefilled_on_other_devices_give_the_same_samples():
    devices, tasks = jax.devices(), [_task(seed) for seed in range(5)]
    together, _ = _play(tasks)
    for decoders in (1, 2):
        prefill = make_mesh(MeshConfig(data=1, tensor=1), devices[:1])
        decode = make_mesh(MeshConfig(data=decoders, tensor=1), devices[1 : 1 + decoders])
        scheduler = Scheduler(
            Engine(MODEL, ENGINE, SAMPLING, (STOP,), decode),
            _Letters(),
            workers=4,
            tool_timeout_s=30.0,
            prefiller=Engine(MODEL, ENGINE, SAMPLING, (STOP,), prefill),
        )
        apart, stats = scheduler.rollout(
            _model(decode), tasks, _Episode, group_size=4, version=1, key=jax.random.key(7)
        )
        scheduler.close()
        _assert_same(apart, together)
        assert stats.prefix_hit_rate > 0.5


def test_tasks_with_a_common_prefix_share_its_pages_under_the_same_weights_only():
    common = list(range(1, 13))
    tasks = [types.SimpleNamespace(id=f"task{i}", prompt=[*common, 20 + i, 3]) for i in range(3)]
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    scheduler = Scheduler(Engine(MODEL, ENGINE, SAMPLING, (STOP,), mesh), _Letters(), workers=4, tool_timeout_s=30.0)
    once = functools.partial(_Episode, turns=1)
    model = _model(mesh)

    def prefilled(tasks, model):
        _, stats = scheduler.rollout(model, tasks, once, group_size=2, version=0, key=jax.random.key(0), first_group=0)
        return stats.prefilled_tokens

    assert prefilled(tasks[:1], model) == 13
    assert prefilled(tasks[1:2], model) == 1
    assert prefilled(tasks[2:], jax.tree.map(lambda x: x + 0, model)) == 13
    scheduler.close()
    apart, _ = _play(tasks[2:], make=once, group_size=2)
    together, _ = _play(tasks, make=once, group_size=2)
    for a, b in zip(apart[0].trajectories, together[2].trajectories, strict=True):
        assert a.sampled.sum() == b.sampled.sum()


def test_a_long_prompt_does_not_hold_up_the_others():
    scheduler = _scheduler(dataclasses.replace(ENGINE, episodes=8))
    scheduler.load(_model(scheduler.engine.mesh), 0)
    short, long = _task(0), types.SimpleNamespace(id="long", prompt=[2] * 16)
    scheduler.submit(short, functools.partial(_Episode, turns=1), group=0, group_size=1, key=(0, 0))
    scheduler.step()
    scheduler.submit(long, functools.partial(_Episode, turns=1), group=1, group_size=1, key=(0, 0))
    before = scheduler.stats.sampled_tokens
    scheduler.step()  # one chunk of four of the long prompt's tokens, and a dispatch for the short one
    assert scheduler.stats.prefilled_tokens < len(short.prompt) + 15
    assert scheduler.stats.sampled_tokens > before
    while scheduler.groups:
        scheduler.step()
    scheduler.close()


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_in_the_middle_of_a_message_and_every_token_says_whose_it_is(recompute):
    scheduler = _scheduler(dataclasses.replace(ENGINE, decode_steps=2))
    mesh = scheduler.engine.mesh
    old, new = _model(mesh), jax.tree.map(lambda x: -x, _model(mesh))
    episodes = []

    def make(task, group, index):
        episodes.append(_Episode(task, group, index, turns=1))
        return episodes[-1]

    scheduler.load(old, 3)
    scheduler.submit(_task(1), make, group=0, group_size=3, key=(0, 7))
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
    (group,), _ = _play([_task(1)], group_size=6)
    assert [t.index for t in group.trajectories] == list(range(6))
    assert len({tuple(t.tokens) for t in group.trajectories}) > 1


def test_a_prompt_is_prefilled_once_for_its_group():
    task = _task(8)
    _, one = _play([task], group_size=1, make=lambda *a: _Episode(*a, turns=1))
    _, many = _play([task], group_size=6, make=lambda *a: _Episode(*a, turns=1))
    assert one.prefilled_tokens == many.prefilled_tokens == len(task.prompt) - 1
    assert many.needed_tokens == 6 * (len(task.prompt) - 1)


def test_nothing_is_compiled_after_the_first_rollout():
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    scheduler = Scheduler(Engine(MODEL, ENGINE, SAMPLING, (STOP,), mesh), _Letters(), workers=4, tool_timeout_s=30.0)
    _play([_task(0), _task(7)], scheduler=scheduler)
    _model(mesh)  # what the test itself compiles
    with CompilationCounter() as compilations:
        _play([_task(seed) for seed in range(1, 6)], scheduler=scheduler)
    scheduler.close()
    assert compilations.count == 0


def test_a_rule_on_text_cuts_the_message_at_the_token_that_triggers_it():
    groups, _ = _play([_task(2), _task(3)], make=lambda *a: _Episode(*a, protocol=_Protocol(rule=True)))
    plain, _ = _play([_task(2), _task(3)])
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
        return _Episode(task, group, index, wait=(lambda: release.wait(20)) if (group, index) == (0, 0) else None)

    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    scheduler = Scheduler(Engine(MODEL, ENGINE, SAMPLING, (STOP,), mesh), _Letters(), workers=4, tool_timeout_s=30.0)

    def on_finished(trajectory):
        finished.append((trajectory.group, trajectory.index))
        if len(finished) == 7:  # everybody but the slow one
            release.set()

    tasks = [_task(0), _task(1)]
    scheduler.rollout(
        _model(mesh), tasks, make, group_size=4, version=0, key=jax.random.key(0), on_finished=on_finished
    )
    scheduler.close()
    assert finished[-1] == (0, 0)


def test_a_tool_that_never_answers_is_named():
    release = threading.Event()
    episodes = []

    def make(task, group, index):
        episodes.append(_Episode(task, group, index, wait=lambda: release.wait(20)))
        return episodes[-1]

    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    scheduler = Scheduler(Engine(MODEL, ENGINE, SAMPLING, (STOP,), mesh), _Letters(), workers=4, tool_timeout_s=0.3)
    with pytest.raises(RolloutTimeout, match="task5"):
        scheduler.rollout(_model(mesh), [_task(5)], make, group_size=2, version=0, key=jax.random.key(0))
    release.set()
    scheduler.close()
    assert all(episode.closed for episode in episodes)


def test_a_prompt_that_is_too_long_is_named():
    task = types.SimpleNamespace(id="long", prompt=[1] * 17)
    with pytest.raises(ValueError, match=r"long.*17.*prompt_length=16"):
        _play([task])
