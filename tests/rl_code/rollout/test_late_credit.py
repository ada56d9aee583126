"""Stores are credited by what their notes do to later episodes, as the record tells it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from configs import quickstart
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError, build
from rl_code.environment.notes import LEFT_OUT, as_read_by, notes_of, with_notes, without_note
from rl_code.environment.tools.api import find_tools
from rl_code.learner.batching import PackConfig, pack
from rl_code.rollout.late_credit import late, only, worth
from rl_code.rollout.memory import MemoryConfig
from rl_code.rollout.note_book import NoteBook
from rl_code.run.config import RunConfig
from rl_code.store.claims import Claims, WorkConfig
from rl_code.store.store import GroupStore
from rl_code.types import Context, Group, Reward, Task, ToolCall, ToolResult, Trajectory, Turn
from tests.rl_code.store.groups import make_items

TOOLS = find_tools((Named("memory_store"), Named("memory_recall"), Named("submit")))
MEMORY = MemoryConfig(left_out=2)
SIZE = 4
# prompt, a message, its result, a message that stores, its result, a message
SAMPLED = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0, 1], bool)


def trajectory(index, name=None, reward=0.0, version=0):
    """An episode that stores a note of this name with its second message, or none."""
    count = len(SAMPLED)
    context = Context(
        np.arange(count, dtype=np.int32) + 1,
        SAMPLED,
        np.where(SAMPLED, -1.0, 0.0).astype(np.float32),
        np.where(SAMPLED, version, -1).astype(np.int32),
    )
    call = ToolCall("memory_store", {"name": name, "text": f"{name}{index}"})
    stored = (ToolResult("memory_store", "stored", ok=name is not None),)
    turns = (
        Turn("prompt", 0, 2, ""),
        Turn("assistant", 2, 4, ""),
        Turn("tool", 4, 5, ""),
        Turn("assistant", 5, 8, "", (call,)),
        Turn("tool", 8, 9, "", results=stored),
        Turn("assistant", 9, 10, ""),
    )
    total = Reward(reward, {})
    return Trajectory("t/0", 0, index, (context,), 2, turns, "submitted", total)


def task(**meta):
    return Task("t/0", (), meta={"split": "train", "repository": "shop", **meta})


def record(folder, steps):
    """A store with these groups, one for each step."""
    store, actor = GroupStore(folder, "learner"), GroupStore(folder, "actor")
    claims = Claims(actor, WorkConfig(heartbeat_timeout_s=60.0))
    for step, group in enumerate(steps):
        size = len(group.trajectories)
        store.plan(make_items(step, 1, version=step, group_size=size))
        (item,) = claims.claim(1)
        moved = (dataclasses.replace(t, group=item.group) for t in group.trajectories)
        actor.deliver(item, Group(group.task, tuple(moved)))
        store.consume(step, store.wait(step, 10.0), version=step, weights="0")
    claims.close()
    return store


def test_worth_is_the_contrast_between_those_that_read_the_note_and_those_that_did_not():
    noted = without_note(with_notes(task(), {"a": "1"}), "a", 2, (0, 0, 1))
    group = Group(noted, tuple(trajectory(i, reward=r) for i, r in enumerate([1, 0.5, 0.25, 0])))
    assert worth(group) == 0.75 - 0.125
    faulty = dataclasses.replace(group.trajectories[3], status="fault")
    assert worth(Group(noted, (*group.trajectories[:3], faulty))) == 0.5
    faults = tuple(dataclasses.replace(t, status="fault") for t in group.trajectories[2:])
    assert worth(Group(noted, (*group.trajectories[:2], *faults))) is None
    assert worth(Group(task(), group.trajectories)) is None


def test_siblings_read_all_notes_but_one():
    noted = without_note(with_notes(task(), {"a": "1", "b": "2"}), "a", 2, (0, 0, 1))
    read = [notes_of(as_read_by(noted, index)) for index in range(SIZE)]
    assert read == [{"a": "1", "b": "2"}] * 2 + [{"b": "2"}] * 2
    plain = with_notes(task(), {"a": "1"})
    assert as_read_by(plain, 3) is plain


def test_the_note_that_was_left_out_least_is_left_out_next(tmp_path):
    first = Group(task(), (trajectory(0, "a"), trajectory(1, "b"), trajectory(2), trajectory(3)))
    tried = without_note(with_notes(task(), {"a": "a0", "b": "b1"}), "a", 2, (0, 0, 0))
    none = [
        Group(tried, tuple(trajectory(i, version=step) for i in range(SIZE))) for step in (1, 2)
    ]
    store = record(tmp_path, [first, *none])
    book = NoteBook(store, TOOLS, 0, MEMORY, SIZE)
    assert LEFT_OUT not in book.task(task(), 1).meta
    at = {step: book.task(task(), step).meta[LEFT_OUT] for step in (2, 3, 4)}
    assert at[2] == ("a", 2, (0, 0, 0))  # of equals the oldest
    assert at[3] == at[4] == ("b", 2, (0, 0, 1))
    # too old to be credited, and a book that does not credit
    aged = NoteBook(store, TOOLS, 0, dataclasses.replace(MEMORY, oldest=1), SIZE)
    assert LEFT_OUT not in aged.task(task(), 3).meta
    assert LEFT_OUT not in NoteBook(store, TOOLS, 0, MemoryConfig(), SIZE).task(task(), 3).meta


def test_the_message_that_stored_is_trained_with_the_worth_of_its_note(tmp_path):
    stored = Group(task(), (trajectory(0), trajectory(1, "a"), trajectory(2), trajectory(3)))
    store = record(tmp_path, [stored])
    noted = without_note(with_notes(task(), {"a": "a1"}), "a", 2, (0, 0, 1))
    rewards = [1.0, 0.5, 0.25, 0.0]
    later = [trajectory(i, reward=r, version=3) for i, r in enumerate(rewards)]
    group = Group(noted, tuple(later))
    ((origin, credit),) = late(store, [group], MEMORY)
    assert credit == 0.625
    (one,) = origin.trajectories
    assert one.index == 1 and one.contexts[0].sampled.tolist() == [0] * 5 + [1] * 3 + [0] * 2
    assert late(store, [group], MemoryConfig()) == []
    # beside the step's own groups, as old as it is
    config = PackConfig(rows=4, slots=40, targets=30, late_staleness=3)
    groups = [group, origin]
    batch, _ = pack(groups, [[0.5, 0.0, -0.2, -0.3], [credit]], config, version=3, late=1)
    where = (batch.mask > 0) & (batch.advantages == np.float32(0.625))
    assert sorted(batch.targets[where]) == [6, 7, 8] and set(batch.staleness[where]) == {3}
    assert (batch.mask > 0).sum() == 4 * 6 + 3
    young = dataclasses.replace(config, late_staleness=2)
    with pytest.raises(ValueError, match="allowed is 0 to 2"):
        pack(groups, [[0.5, 0.0, -0.2, -0.3], [credit]], young, version=3, late=1)
    with pytest.raises(ValueError, match="allowed is 0 to 0"):
        pack(groups, [[0.5, 0.0, -0.2, -0.3], [credit]], config, version=3)


def test_a_note_that_was_stored_again_is_its_last_store(tmp_path):
    first = Group(task(), (trajectory(0, "a"), trajectory(1, "a")))
    book = NoteBook(record(tmp_path, [first]), TOOLS, 0, MEMORY, SIZE)
    found = book.task(task(), 2)
    assert notes_of(found) == {"a": "a1"} and found.meta[LEFT_OUT] == ("a", 2, (0, 0, 1))


def test_one_message_alone_stays_with_its_choices():
    noted = {"experts": np.arange(6)[:, None]}
    t = trajectory(0, "a")
    t = dataclasses.replace(t, contexts=(dataclasses.replace(t.contexts[0], choices=noted),))
    (context,) = only(t, t.turns[3]).contexts
    assert context.choices["experts"].ravel().tolist() == [2, 3, 4]


def test_configs_in_which_no_store_can_be_credited_are_refused():
    given = quickstart.get_config()
    given.tools = ("write_file", "run_tests", "memory_store", "memory_recall", "submit")
    size = build(RunConfig, given).train.group_size
    given.memory = dict(left_out=size // 2)
    config = build(RunConfig, given)
    plain = quickstart.get_config()
    plain.tools = given.tools
    more = config.train.pack.rows - build(RunConfig, plain).train.pack.rows
    assert more >= config.train.tasks_per_step and config.train.pack.late_staleness == 16
    given.memory = dict(left_out=size)
    with pytest.raises(ConfigError, match="must be less than train"):
        build(RunConfig, given)
    with pytest.raises(ConfigError, match="no message makes notes"):
        MemoryConfig(Named("error_driven"), left_out=1)
