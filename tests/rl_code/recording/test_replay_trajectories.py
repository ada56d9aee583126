"""A recorded trajectory is sampled again, token for token, in every mode; and a changed record shows.

In the long tests nothing is replaced: tasks, episodes, sandboxes, engine, store, weights, update.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from models.families import PRESETS
from rl_code.config.read_config import ConfigError
from rl_code.recording.fork import fork
from rl_code.recording.replay_trajectories import find, play_again
from rl_code.recording.trajectory_difference import of_trajectories
from rl_code.rollout.again import versions_of
from rl_code.run.config import RunConfig
from rl_code.run.workdir import STORE
from rl_code.store import group_records
from rl_code.store.errors import StoreError
from rl_code.store.store import GroupStore
from rl_code.train import train
from rl_code.types import Group, ToolResult
from rl_code.weights import version_records
from tests.models.small import narrow_preset
from tests.rl_code.store.groups import (
    group_path,
    make_group,
    make_items,
    out_of_shards,
    put_group,
)
from tests.rl_code.test_asynchrony import make_config
from tests.rl_code.trajectories import with_context

pytestmark = pytest.mark.usefixtures("traced_once")

STEPS = 4
WAYS = {
    "one_step": ("one_step", 1, False),
    "in_flight": ("in_flight", 2, False),
    "in_flight, recompute": ("in_flight", 2, True),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset())


class Recordings:
    """Runs by mode, made when they are first asked for."""

    def __init__(self, folder: Path):
        self._folder = folder

    def config(self, way: str) -> RunConfig:
        config = make_config(*WAYS[way])
        # short dispatches, so that weights change within messages
        engine = dataclasses.replace(config.rollout.engine, decode_steps=2)
        return dataclasses.replace(
            config, rollout=dataclasses.replace(config.rollout, engine=engine)
        )

    def workdir(self, way: str) -> Path:
        folder = self._folder / way.replace(", ", "_")
        if not folder.exists():
            train(self.config(way), folder)
        return folder


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("recordings"))


def again(config: RunConfig, workdir: Path, step: int, number: int, samples) -> list:
    found = find(workdir, step, str(number))
    return list(play_again(config, workdir, found, samples))


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_recorded_group_is_sampled_again_token_for_token(recordings, way):
    """Without an actor beside the learner it is in test_replay_signals.py."""
    workdir = recordings.workdir(way)
    config = recordings.config(way)
    answers = 0
    for step in (1, 3):
        found = again(config, workdir, step, step // 2, range(4))
        assert [one.difference for one in found] == [None] * 4, step
        answers += sum(len(turn.results) for one in found for turn in one.recorded.turns)
    assert answers


@pytest.mark.long
def test_weights_that_are_kept_nowhere_are_made_again(recordings, tmp_path):
    workdir = shutil.copytree(recordings.workdir("one_step"), tmp_path / "copy")
    shutil.rmtree(workdir / version_records.FOLDER)
    shutil.rmtree(workdir / "checkpoints")
    config = recordings.config("one_step")
    assert again(config, workdir, 3, 0, [2])[0].difference is None
    # a damaged group lies on the way
    out_of_shards(workdir / STORE)
    path = group_path(workdir / STORE, 1, 0)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StoreError, match="is damaged"):
        again(config, workdir, 3, 0, [2])


@pytest.mark.long
def test_weights_that_cannot_be_read_are_made_again(recordings, tmp_path):
    workdir = shutil.copytree(recordings.workdir("one_step"), tmp_path / "copy")
    folder = workdir / version_records.FOLDER
    assert version_records.numbers(folder)
    for number in version_records.numbers(folder):
        version_records.record_path(folder, number).write_text("damaged")
    assert again(recordings.config("one_step"), workdir, 3, 0, [2])[0].difference is None


def tamper(workdir: Path, step: int, number: int, sample: int, change) -> None:
    """Changes a trajectory on record; the record stays valid."""
    store = GroupStore(workdir / STORE)
    record = store.record(step, number)
    trajectories = list(record.group.trajectories)
    trajectories[sample] = change(trajectories[sample])
    group = Group(record.group.task, tuple(trajectories))
    data = group_records.encode(step, number, record.actor, record.when, group)
    if (store.folder / "shards").exists():
        out_of_shards(store.folder)
    put_group(store.folder, step, number, data)


def other_token(trajectory):
    place = np.flatnonzero(trajectory.sampled)[3]
    tokens = trajectory.tokens.copy()
    tokens[place] = (tokens[place] + 1) % 200
    return with_context(trajectory, tokens=tokens)


def other_logprob(trajectory):
    place = np.flatnonzero(trajectory.sampled)[3]
    logprobs = trajectory.logprobs.copy()
    logprobs[place] = np.nextafter(logprobs[place], np.float32(-9), dtype=np.float32)
    return with_context(trajectory, logprobs=logprobs)


def other_answer(trajectory):
    turns = list(trajectory.turns)
    at = next(at for at, turn in enumerate(turns) if turn.results)
    first = turns[at].results[0]
    results = (ToolResult(first.name, first.content + "!", first.ok), *turns[at].results[1:])
    turns[at] = dataclasses.replace(turns[at], results=results)
    return dataclasses.replace(trajectory, turns=tuple(turns))


def other_reward(trajectory):
    reward = dataclasses.replace(trajectory.reward, total=trajectory.reward.total + 1)
    return dataclasses.replace(trajectory, reward=reward)


def other_version(trajectory):
    versions = trajectory.versions.copy()
    versions[np.flatnonzero(trajectory.sampled)[3]] += 1
    return with_context(trajectory, versions=versions)


CHANGES = {
    "token": other_token,
    "log-probability": other_logprob,
    "tool answer": other_answer,
    "reward": other_reward,
    "version of the weights": other_version,
}


@pytest.mark.long
def test_a_changed_record_shows_what_was_changed_and_where(recordings, tmp_path):
    config = recordings.config("one_step")
    workdir = shutil.copytree(recordings.workdir("one_step"), tmp_path / "copy")
    for number, (kind, change) in enumerate(list(CHANGES.items())[:4]):
        step, sample = 3 if number < 2 else 2, 1
        record = GroupStore(workdir / STORE).record(step, number % 2)
        tamper(workdir, step, number % 2, sample, change)
        (found,) = again(config, workdir, step, number % 2, [sample])
        assert found.difference.kind == kind
        recorded = record.group.trajectories[sample]
        if kind in ("token", "log-probability"):
            assert found.difference.place == np.flatnonzero(recorded.sampled)[3]
            assert str(found.difference).startswith(f"sample {sample} at token ")


@pytest.mark.long
def test_in_flight_the_recorded_keys_matter(recordings):
    """Without them some trajectory of several versions comes out otherwise."""
    way = "in_flight"
    store = GroupStore(recordings.workdir(way) / STORE)
    several = [
        trajectory
        for step in range(STEPS)
        for record in store.read(step)
        for trajectory in record.group.trajectories
        if len(versions_of(trajectory)) > 1
    ]
    assert several and any(trajectory.contexts[0].keys for trajectory in several)


def test_a_step_that_is_not_on_record_is_said_with_those_that_are(tmp_path):
    store = GroupStore(tmp_path / STORE, "learner")
    items = make_items(0, 3)
    store.plan(items)
    for item in items:
        store.deliver(item, make_group(item))
    store.consume(0, store.read(0), version=0)
    words = rf"--step=9: not on record in {re.escape(str(tmp_path))}; on record are steps 0 to 0"
    with pytest.raises(ConfigError, match=words):
        find(tmp_path, 9, "0")
    with pytest.raises(ConfigError, match=r"step 0 of .* has 3 groups, .* of tasks t/0, t/7, t/14"):
        find(tmp_path, 0, "t/8")
    assert find(tmp_path, 0, "2").item == find(tmp_path, 0, "t/14").item == items[2]


@pytest.mark.parametrize(
    "kind", ["token", "log-probability", "tool answer", "reward", "version of the weights"]
)
def test_the_first_difference_of_two_trajectories_is_told(kind):
    (item,) = make_items(0, 1)
    there = make_group(item).trajectories[1]
    assert of_trajectories(there, make_group(item, seconds=9.0).trajectories[1]) is None
    here = CHANGES[kind](there)
    found = of_trajectories(there, here)
    assert (found.kind, found.sample) == (kind, 1)
    # what comes later hides nothing: a longer trajectory is told by what differs first in it
    longer = with_context(
        here,
        **{
            name: np.append(getattr(here, name), getattr(here, name)[-1:])
            for name in ("tokens", "sampled", "logprobs", "versions")
        },
    )
    assert of_trajectories(there, longer).kind == (kind if kind != "reward" else "length")


def test_what_the_model_chose_for_a_token_differs_before_the_token():
    (item,) = make_items(0, 1)
    plain = make_group(item).trajectories[1]
    sampled = np.flatnonzero(plain.sampled)
    blocks = np.arange(2 * len(sampled), dtype=np.uint8).reshape(-1, 1, 1, 2)
    other = blocks.copy()
    other[1, 0, 0] = 9, 8
    there, here = (with_context(plain, choices={"blocks": x}) for x in (blocks, other))
    assert of_trajectories(there, there) is None
    # one of the two may have noted nothing
    assert of_trajectories(there, plain) is None
    found = of_trajectories(there, here)
    assert (found.kind, found.place) == ("choice of blocks", sampled[1])
    assert (found.there, found.here) == ([[[2, 3]]], [[[9, 8]]])
    tokens = plain.tokens.copy()
    tokens[sampled[1]] += 1
    assert of_trajectories(there, with_context(here, tokens=tokens)).kind == "choice of blocks"


@pytest.mark.long
def test_a_fork_replays_what_it_shares_and_what_is_its_own(recordings, tmp_path):
    config = recordings.config("in_flight")
    optimizer = dataclasses.replace(config.train.optimizer, learning_rate=0.003)
    changed = dataclasses.replace(
        config, train=dataclasses.replace(config.train, optimizer=optimizer)
    )
    fork(recordings.workdir("in_flight"), tmp_path / "fork", 2, changed)
    train(changed, tmp_path / "fork")
    for step in (1, 3):
        found = again(changed, tmp_path / "fork", step, 0, range(4))
        assert [one.difference for one in found] == [None] * 4
