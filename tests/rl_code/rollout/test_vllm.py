"""Episodes whose messages a server of vLLM samples are what the trainer computes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from models.sharding import MeshConfig, make_mesh
from rl_code.config.read_config import ConfigError
from rl_code.rollout.vllm_client import VllmClient, VllmError
from rl_code.rollout.vllm_scheduler import VllmScheduler
from tests.rl_code.rollout.fake_vllm import FakeVllm, serving
from tests.rl_code.rollout.small import (
    ENGINE,
    MODEL,
    SAMPLING,
    STOP,
    Episode,
    Letters,
    Protocol,
    assert_trained_alike,
    model_on,
    task_of,
    trainer_logprobs,
)
from tests.rl_code.rollout.test_sub_agents import Nested
from tests.rl_code.rollout.test_summaries import Summarising, whole

KEY = (1, 2)


@pytest.fixture
def fake() -> FakeVllm:
    return FakeVllm(MODEL)


@contextlib.contextmanager
def playing(fake: FakeVllm, folder) -> Iterator[VllmScheduler]:
    """A scheduler that the server samples for."""
    with serving(fake) as url:
        client = VllmClient(url, 60.0)
        client.begin()
        settings = dict(workers=4, worker_deadline_s=60.0)
        made = VllmScheduler(client, ENGINE, SAMPLING, (STOP,), Letters(), folder, **settings)
        try:
            yield made
        finally:
            fake.allow(None)
            made.close()


@functools.cache
def weights(version: int):
    """The weights of a version; each has others."""
    model = model_on(make_mesh(MeshConfig(data=1, tensor=1)))
    return jax.tree.map(lambda x: x * (1 + 0.25 * version), model)


def finish(scheduler: VllmScheduler) -> list:
    """The groups that were handed in."""
    found = {}
    while scheduler.groups:
        found |= scheduler.step()
    return [found[tag] for tag in sorted(found)]


def submit(scheduler: VllmScheduler, seed: int, *, size: int = 4, make=Episode) -> None:
    way = dict(group=seed, group_size=size, key=KEY, tag=seed)
    scheduler.submit(task_of(seed), make, **way)


def test_log_probabilities_and_versions_are_those_of_the_weights_that_were_pushed(fake, tmp_path):
    with playing(fake, tmp_path) as scheduler:
        scheduler.load(weights(3), 3)
        for seed in range(3):
            submit(scheduler, seed)
        groups = finish(scheduler)
        stats = scheduler.take_stats()
    trajectories = [t for group in groups for t in group.trajectories]
    assert [t.index for t in trajectories] == [0, 1, 2, 3] * 3
    assert_trained_alike(trajectories, MODEL, weights(3))
    assert all((t.versions == np.where(t.sampled, 3, -1)).all() for t in trajectories)
    assert all(len(t.turns) == 0 and t.sampled.sum() >= 3 for t in trajectories)
    assert stats.sampled_tokens == sum(t.sampled.sum() for t in trajectories) == fake.sampled
    assert not list(tmp_path.iterdir())  # what was pushed is gone


def test_every_message_has_a_seed_of_its_own_that_its_key_fixes(fake, tmp_path):
    with playing(fake, tmp_path) as scheduler:
        scheduler.load(weights(0), 0)
        submit(scheduler, 5)
        first = finish(scheduler)
        seeds = [body["sampling_params"]["seed"] for body in fake.requests]
        submit(scheduler, 5)
        assert finish(scheduler)[0].trajectories[2].tokens.tolist() == (
            first[0].trajectories[2].tokens.tolist()
        )
    assert len(set(seeds)) == len(seeds) >= 8
    assert sorted(body["sampling_params"]["seed"] for body in fake.requests) == sorted(2 * seeds)


def test_requests_share_keys_with_those_of_the_same_weights_alone(fake, tmp_path):
    with playing(fake, tmp_path) as scheduler:
        for version in (0, 1):
            scheduler.load(weights(version), version)
            submit(scheduler, version, size=2)
            finish(scheduler)
    salts = [body["cache_salt"] for body in fake.requests]
    assert len(set(salts)) == 2 and salts == sorted(salts, key=salts.index)


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_come_in_the_middle_of_messages_are_told_by_token(fake, tmp_path, recompute):
    fake.allow(6)
    with playing(fake, tmp_path) as scheduler:
        scheduler.load(weights(1), 1)
        submit(scheduler, 0)
        scheduler.step()
        fake.await_sampled(6)
        scheduler.load(weights(2), 2, recompute=recompute)
        fake.allow(None)
        (group,) = finish(scheduler)
    versions = np.concatenate([t.versions[t.sampled] for t in group.trajectories])
    assert np.sum(versions == 1) == 6 and {*versions.tolist()} == {1, 2}
    by_version = {n: trainer_logprobs(group.trajectories, weights(n)) for n in (1, 2)}
    for row, t in enumerate(group.trajectories):
        for place in np.flatnonzero(t.sampled):
            predicted = by_version[int(t.versions[place])][row, place - 1, t.tokens[place]]
            assert abs(t.logprobs[place] - predicted) < 1e-5
    # kept keys, or keys of the new weights for messages in progress
    assert ("/reset_prefix_cache" in fake.routes) == recompute
    assert fake.routes.index("/pause") < fake.routes.index("/update_weights")
    assert not fake.paused


def test_a_rule_on_text_ends_a_message_in_the_middle(fake, tmp_path):
    make = functools.partial(Episode, protocol=Protocol(rule=True))
    with playing(fake, tmp_path) as scheduler:
        scheduler.load(weights(0), 0)
        for seed in range(3):
            submit(scheduler, seed, make=make)
        groups = finish(scheduler)
    trajectories = [t for group in groups for t in group.trajectories]
    assert_trained_alike(trajectories, MODEL, weights(0))
    assert fake.aborted and any(7 in t.tokens[t.sampled] for t in trajectories)
    for t in trajectories:  # behind a token 7 follows what is not sampled
        places = np.flatnonzero(t.sampled & (t.tokens == 7))
        assert not t.sampled[[place + 1 for place in places if place + 1 < len(t.tokens)]].any()


@pytest.mark.parametrize("make", [Nested, Summarising])
@pytest.mark.long
def test_every_context_of_a_tree_is_what_the_trainer_computes(fake, tmp_path, make):
    with playing(fake, tmp_path) as scheduler:
        scheduler.load(weights(0), 4)
        for seed in range(3):
            submit(scheduler, seed, make=make)
        trajectories = [t for group in finish(scheduler) for t in group.trajectories]
    assert sum(len(t.contexts) > 2 for t in trajectories) > 4
    wholes = [whole(t, index) for t in trajectories for index in range(len(t.contexts))]
    assert_trained_alike([one for one in wholes if one.sampled.any()], MODEL, weights(0))
    assert {int(v) for t in trajectories for v in t.versions[t.sampled]} == {4}


def test_a_tensor_that_a_push_left_as_it_was_is_named(fake, tmp_path):
    with playing(fake, tmp_path) as scheduler:
        scheduler.load(weights(0), 0)
        fake.stale = {"model.norm.weight"}
        with pytest.raises(VllmError, match=r"1 of \d+ tensors are not .*: model\.norm\.weight"):
            scheduler.load(weights(1), 1)


def test_a_head_that_shares_the_embedding_is_compared_too(fake, tmp_path):
    with playing(fake, tmp_path) as scheduler:
        scheduler.load(weights(0), 0)
        fake.held["lm_head.weight"] = fake.held["model.embed_tokens.weight"]
        fake.stale = {"lm_head.weight"}
        with pytest.raises(VllmError, match=r"lm_head\.weight"):
            scheduler.load(weights(1), 1)


def test_tokens_of_weights_that_another_pushed_are_refused(fake, tmp_path):
    with playing(fake, tmp_path) as scheduler:
        scheduler.load(weights(0), 0)
        fake.label = "another"
        submit(scheduler, 0)
        with pytest.raises(VllmError, match="each actor needs a server of its own"):
            finish(scheduler)


def test_a_group_that_is_given_up_lets_go_of_its_messages(fake, tmp_path):
    fake.allow(3)
    with playing(fake, tmp_path) as scheduler:
        scheduler.load(weights(0), 0)
        submit(scheduler, 0)
        submit(scheduler, 1, size=2)
        scheduler.step()
        fake.await_sampled(3)
        scheduler.give_up(0)
        assert scheduler.groups == 1
        fake.allow(None)
        (group,) = finish(scheduler)
        assert group.task.id == "task1"
        fake.allow(0)
        submit(scheduler, 2)
        scheduler.step()
        scheduler.abort()
        assert scheduler.groups == 0
    # closing did not wait for a server that is silent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(version="0.31.0"), "vLLM 0.31.0, and .* speaks to 0.32"),
        (dict(workers=2), "2 workers, of which 1 share each layer"),
        (dict(dtype="torch.bfloat16"), "--dtype=bfloat16, and rollout.dtype='float32'"),
        (dict(logprobs_mode="raw_logprobs"), "--logprobs-mode=raw_logprobs; start it with"),
        (dict(max_model_len=32), "--max-model-len=32, and rollout.engine.length=64"),
        (dict(max_num_seqs=2), "--max-num-seqs=2, and rollout.engine.slots=3"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(fake, change, message):
    for name, value in change.items():
        if name in ("version", "workers"):
            setattr(fake, name, value)
        else:
            section = "scheduler" if name == "max_num_seqs" else "model"
            fake.settings[f"{section}_config"][name] = value
    with serving(fake) as url, pytest.raises(ConfigError, match=message):
        VllmClient(url, 10.0).check("float32", ENGINE.length, ENGINE.slots)


def test_a_server_that_fits_is_described(fake):
    with serving(fake) as url:
        client = VllmClient(url, 10.0)
        client.await_up()
        found = client.check("float32", ENGINE.length, ENGINE.slots)
    assert found["version"] == "0.32.0" and found["prefix_caching"]


def test_a_server_that_is_not_there_is_named(fake):
    with serving(fake) as url:
        pass
    with pytest.raises(VllmError, match=url):
        VllmClient(url, 0.01).await_up()


def test_adapters_and_ways_of_their_own_are_refused(fake, tmp_path):
    with playing(fake, tmp_path) as scheduler:
        scheduler.load(weights(0), 0)
        way = dict(group=0, group_size=1, key=KEY)
        with pytest.raises(ValueError, match="adapter=0"):
            scheduler.submit(task_of(0), Episode, adapter=0, **way)
        with pytest.raises(ValueError, match="vLLM draws all rows alike"):
            scheduler.submit(task_of(0), Episode, ways=[None], **way)
        with pytest.raises(ValueError, match="longer than prompt_length"):
            long = dataclasses.replace(ENGINE, prompt_length=2)
            scheduler.config = long
            scheduler.submit(task_of(0), Episode, **way)
