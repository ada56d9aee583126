"""Whole runs whose episodes are summarised, and whose stores are credited later: trained as sampled,
resumed and replayed.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

import jax
import numpy as np
import pytest

from models.families import PRESETS
from rl_code.config.named import Named
from rl_code.config.read_config import build
from rl_code.environment.notes import LEFT_OUT, notes_of
from rl_code.environment.protocols.compact import Compact
from rl_code.learner.parts import summary_turns
from rl_code.metrics.values import read_metrics
from rl_code.recording.fork import fork
from rl_code.recording.replay_training import replay
from rl_code.recording.replay_trajectories import find, play_again
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from rl_code.tasks.api import find_source
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream
from rl_code.train import train
from rl_code.types import ToolCall
from tests.models.small import narrow_preset
from tests.rl_code.run.lookups import small_settings

pytestmark = pytest.mark.usefixtures("traced_once")

LOOKUP = dict(tokens=60, files=1, matter=1)
SUMMARIES = dict(trigger=150, context=320, tokens=8, most=2, request="sum up", go_on="go on")


@dataclasses.dataclass(frozen=True)
class Reader(Compact):
    """Reads the task's file in every message, whatever the model writes."""

    def parse(self, text, task, tools):
        return [ToolCall("read_file", {"path": task.path})]


@dataclasses.dataclass(frozen=True)
class Keeper(Compact):
    """Stores a note in every message, whatever the model writes, under one of four names."""

    def parse(self, text, task, tools):
        arguments = {"name": f"n{len(text) % 4}", "text": f"wrote {len(text)} characters"}
        return [ToolCall("memory_store", arguments)]


@dataclasses.dataclass(frozen=True)
class Shop(Source):
    """Tasks that all are of one repository."""

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[bool] = True

    def load(self, pool, workdir):
        tasks = find_source(Named("lookup", dict(split="train", **LOOKUP)), "tasks").load(
            pool, workdir
        )
        return Stream(lambda at: of_shop(tasks[at]))


def of_shop(task):
    return dataclasses.replace(task, meta={**task.meta, "repository": "shop"})


def make_config(steps: int, *, memory: bool = False, **changes) -> RunConfig:
    """A run of a few small steps: of episodes that read until they are summarised, or that store
    notes on one repository.
    """
    settings = small_settings(
        f"tests.rl_code.run.test_run_with_summaries:{'Keeper' if memory else 'Reader'}",
        steps,
        4,
        prompt=280,
        limits=dict(turns=5, tokens=1000),
        pack=dict(rows=3, slots=1100, targets=200),
        **LOOKUP,
    )
    if memory:
        settings.tasks = dict(name="tests.rl_code.run.test_run_with_summaries:Shop")
    with settings.unlocked():
        if memory:
            settings.tools = ("read_file", "memory_store", "memory_recall", "submit")
            settings.memory = dict(rule=dict(name="recency", most=3), left_out=2)
        else:
            settings.summaries = SUMMARIES
        for key, value in changes.items():
            settings[key] = value
    return build(RunConfig, settings)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset(num_kv_heads=1))


def groups_of(workdir, step):
    return [record.group for record in GroupStore(workdir / STORE).read(step)]


def trajectories_of(workdir, step):
    return [t for group in groups_of(workdir, step) for t in group.trajectories]


def check_replays(config, workdir, steps):
    with Run(config, workdir, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * steps


@pytest.mark.long
def test_a_run_with_summaries_is_resumed_and_replayed_to_the_token(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = dict(asynchrony=dict(mode="one_step"))
    config = make_config(3, **changes)
    train(config, whole)
    train(make_config(2, **changes), parts)
    train(config, parts)
    rows = read_metrics(whole)
    fresh = [row for row in rows if row["rollout/staleness_mean"] == 0.0]
    assert len(rows) == 3 and len(fresh) == 1
    assert all(row["policy/mismatch_max"] < 1e-4 for row in fresh)
    assert all(row["episode/summaries"] > 0 for row in rows)
    for step in range(3):
        for one, other in zip(
            trajectories_of(whole, step), trajectories_of(parts, step), strict=True
        ):
            for name in ("tokens", "sampled", "logprobs", "versions"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
    summarised = trajectories_of(whole, 2)
    assert any(len(t.contexts) == 3 for t in summarised)
    for t in summarised:
        assert len(summary_turns(t)) == len(t.contexts) - 1
        assert max(len(t.whole(index)) for index in range(len(t.contexts))) <= 320
    check_replays(config, parts, 3)
    for again in play_again(config, whole, find(whole, 2, "1"), (0, 3)):
        assert again.difference is None


@pytest.mark.long
def test_a_fork_may_begin_to_have_summaries_and_leave_them_untrained(tmp_path):
    plain, begun = tmp_path / "plain", tmp_path / "begun"
    train(make_config(1, summaries=None), plain)
    config = make_config(3)
    parts = dataclasses.replace(config.train.parts, summaries="none")
    packing = dataclasses.replace(config.train.pack, untrained=("summaries",))
    learned = dataclasses.replace(config.train, parts=parts, pack=packing)
    config = dataclasses.replace(config, train=learned)
    fork(plain, begun, 1, config)
    train(config, begun)
    rows = read_metrics(begun)
    assert [row.get("episode/summaries", 0) > 0 for row in rows] == [False, True, True]
    # targets are what was sampled, without the summaries
    for step in (1, 2):
        found = trajectories_of(begun, step)
        summaries = sum(turn.end - turn.start for t in found for turn in summary_turns(t))
        sampled = sum(int(t.sampled.sum()) for t in found)
        assert summaries and rows[step]["train/tokens"] == sampled - summaries
    check_replays(config, begun, 3)


def kill_at(patch: pytest.MonkeyPatch, *places: tuple[str, int]) -> list[tuple[str, int]]:
    """Makes a run fail at each of these places once: before a write of this name for this step, or
    behind its first delivered group. Returns the places that are still to come.
    """
    left = list(places)

    def killing(name, step_of, when):
        write = getattr(GroupStore, name)

        def killed(self, what, *rest, **named):
            place = name, step_of(what)
            out = write(self, what, *rest, **named) if when == "after" else None
            if place in left:
                left.remove(place)
                raise OSError("killed")
            return out if when == "after" else write(self, what, *rest, **named)

        patch.setattr(GroupStore, name, killed)

    killing("deliver", lambda item: item.step, "after")
    killing("consume", lambda step: step, "before")
    return left


def kept_by_hand(workdir, step: int, most: int) -> dict[str, str]:
    """The newest notes of the steps up to this one, by the calls on record alone."""
    notes: dict[str, str] = {}
    for earlier in range(step + 1):
        for t in trajectories_of(workdir, earlier):
            for message, told in itertools.pairwise(t.turns):
                for call, result in zip(message.calls, told.results, strict=False):
                    if result.ok and call.name == "memory_store":
                        notes.pop(call.arguments["name"], None)
                        notes[call.arguments["name"]] = call.arguments["text"]
                        notes = dict(list(notes.items())[-most:])
    return notes


@pytest.mark.long
def test_a_run_that_credits_stores_is_killed_resumed_and_replayed(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = make_config(4, memory=True)
    train(config, whole)
    with monkeypatch.context() as patch:
        left = kill_at(patch, ("deliver", 1), ("consume", 2), ("deliver", 3))
        while left:
            with pytest.raises(OSError, match="killed"):
                train(config, parts)
        train(config, parts)
    rows = read_metrics(whole)
    left_out = [
        sum(LEFT_OUT in group.task.meta for group in groups_of(whole, step)) for step in range(4)
    ]
    assert left_out[:2] == [0, 0] and sum(left_out) > 0
    assert [row.get("memory/credited", 0) for row in rows] == left_out
    # credit of a store is credit, whatever the rewards of the step's own groups
    worth = [bool(row.get("memory/worth")) for row in rows]
    signal = [row["reward/signal_groups"] > 0 for row in rows]
    assert [row["train/credited"] > 0 for row in rows] == [
        one or other for one, other in zip(worth, signal, strict=True)
    ]
    for name in ("train/tokens", "batch/rows", "memory/credited"):
        assert [row.get(name) for row in rows] == [row.get(name) for row in read_metrics(parts)]
    for step in range(4):
        # what an episode reads is what the steps up to the last but one left, killed or not
        notes = kept_by_hand(whole, step - 2, config.memory.rule.settings["most"])
        for one, other in zip(groups_of(whole, step), groups_of(parts, step), strict=True):
            assert notes_of(one.task) == notes_of(other.task) == notes
            assert one.task.meta == other.task.meta
            for t, again in zip(one.trajectories, other.trajectories, strict=True):
                np.testing.assert_array_equal(t.tokens, again.tokens)
    check_replays(config, parts, 4)
    (step, number) = next(
        (step, number)
        for step in range(4)
        for number, group in enumerate(groups_of(whole, step))
        if LEFT_OUT in group.task.meta
    )
    for again in play_again(config, whole, find(whole, step, str(number)), (0, 3)):
        assert again.difference is None
