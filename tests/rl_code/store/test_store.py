"""Plans, deliveries and consumptions happen once; what is missing, different or damaged is
named.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import shutil
import threading
import time

import grain
import pytest

from rl_code.store import group_records
from rl_code.store.errors import StoreError
from rl_code.store.missing import StoreTimeout
from rl_code.store.reader import RecordReader
from rl_code.store.source import RecordSource, dataset
from rl_code.store.steps import step_folder, taken_bytes, taken_path
from rl_code.store.store import GroupStore
from rl_code.types import Fork
from tests.rl_code.store.groups import identical, make_group, make_items


@pytest.fixture
def store(tmp_path):
    return GroupStore(tmp_path / "store", "learner")


def run_steps(store, steps, per_step=2):
    """Plans, delivers and consumes."""
    for step in steps:
        items = make_items(step, per_step, version=step)
        store.plan(items)
        for item in items:
            store.deliver(item, make_group(item))
        store.consume(step, store.read(step), version=step)


# --- Plans ----------------------------------------------------------------------------------------


def test_a_plan_is_written_once_and_accepted_again(store):
    items = make_items(0, 3, version=4)
    assert store.plan(items) and not store.plan(items)
    assert GroupStore(store.folder).items(0) == items
    assert not GroupStore(store.folder, "learner").plan(items)


def test_another_plan_is_refused_and_the_difference_named(store):
    store.plan(make_items(0, 3, version=4))
    with pytest.raises(
        StoreError, match=r"item \(0, 0\): version = 4 there, 5 here; item \(0, 1\)"
    ):
        store.plan(make_items(0, 3, version=5))
    with pytest.raises(StoreError, match="3 items there, 2 here"):
        store.plan(make_items(0, 2, version=4))
    assert store.items(0) == make_items(0, 3, version=4)


def test_a_plan_may_grow_while_its_step_is_open(store):
    screen = make_items(0, 2, kind="screen")
    train = make_items(0, 2, first=2)
    store.plan(screen)
    for item in screen:
        store.deliver(item, make_group(item))
    assert len(store.wait(0, 5.0)) == 2
    with pytest.raises(ValueError, match="has 2 items, not 3"):
        store.plan(make_items(0, 1, first=3))
    store.plan(train)
    for item in train:
        store.deliver(item, make_group(item))
    assert [record.number for record in store.wait(0, 5.0, range(2, 4))] == [2, 3]
    store.consume(0, store.wait(0, 5.0), version=0)
    with pytest.raises(StoreError, match="step 0 is consumed"):
        store.plan(make_items(0, 1, first=4))
    # as a learner does that repeats the step
    assert not store.plan(screen) and not store.plan(train)


def test_steps_are_planned_in_order_from_anywhere(store):
    store.plan(make_items(40, 1))
    store.plan(make_items(41, 1))
    for step in (39, 43):
        with pytest.raises(StoreError, match=f"step {step} cannot be planned after steps 40 to 41"):
            store.plan(make_items(step, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"group_size": 0},
        {"seed": (0.5,)},
        {"version": -1},
        {"kind": "test"},
        {"task": True},
    ],
)
def test_items_that_make_no_sense_are_refused(change):
    with pytest.raises(ValueError, match="Item"):
        dataclasses.replace(make_items(0, 1)[0], **change)


def test_a_plan_has_one_step_and_consecutive_numbers(store):
    one, two, three = make_items(0, 3)
    for items in ([], [one, three], [two, one], [one, dataclasses.replace(two, step=1)]):
        with pytest.raises(ValueError, match="plan"):
            store.plan(items)


# --- Deliveries -----------------------------------------------------------------------------------


def test_of_several_deliveries_one_is_taken_for_good(store):
    items = make_items(0, 2)
    store.plan(items)
    others = [GroupStore(store.folder, f"actor-{i}") for i in range(8)]

    def deliver(i):
        for item in items:
            assert others[i].deliver(item, make_group(item, seconds=float(i)))

    threads = [threading.Thread(target=deliver, args=(i,), daemon=True) for i in range(1, 8)]
    for thread in threads:
        thread.start()
    taken = [record.digest for record in store.wait(0, 20.0)]
    for thread in threads:
        thread.join()
    deliver(0)  # by an actor whose name sorts before those of the others
    # A learner that begins again, its other processes, and whoever reads the record.
    for again in (GroupStore(store.folder, "learner"), GroupStore(store.folder)):
        assert [record.digest for record in again.wait(0, 0.0)] == taken
    assert [store.record(0, number).digest for number in range(2)] == taken
    assert store.consume(0, store.read(0), version=0)
    assert list(store.folder.rglob("aside*")) == []


def test_two_learners_take_the_same_groups(store):
    """As when one hangs and another is started in its place."""
    (item,) = make_items(0, 1)
    store.plan([item])
    hung = GroupStore(store.folder, "learner")
    actors = [GroupStore(store.folder, name) for name in "ba"]
    actors[0].deliver(item, make_group(item, seconds=1.0))
    listing = hung.reader.listing(0)
    (first,) = store.wait(0, 0.0)
    actors[1].deliver(item, make_group(item, seconds=2.0))
    collector = hung._collect(0, listing)  # what it saw before the other one took the group
    assert collector.records[0].digest == first.digest
    assert hung.wait(0, 0.0)[0].digest == first.digest


def test_half_of_a_group_is_no_group_and_is_gone_with_its_actor(store):
    items = make_items(0, 2)
    store.plan(items)
    actor = GroupStore(store.folder, "actor")
    actor.deliver(items[0], make_group(items[0]))
    (path,) = step_folder(store.folder, 0).glob("groups/*")
    whole = path.read_bytes()
    for cut in (1, 30, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        assert store.missing(0) == GroupStore(store.folder).missing(0) == items[1:]
    again = GroupStore(store.folder, "actor")
    again.deliver(items[1], make_group(items[1]))
    assert [record.actor.incarnation for record in store.wait(0, 1.0)] == [0, 1]


def test_after_a_write_that_failed_the_group_can_be_delivered_again(store, monkeypatch):
    items = make_items(0, 3)
    store.plan(items)
    actor = GroupStore(store.folder, "actor")
    actor.deliver(items[0], make_group(items[0]))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:40]) and _full())
        patch.setattr(os, "ftruncate", lambda file, size: _full())
        with pytest.raises(
            StoreError, match=r"could not write the group of item \(0, 1\) to .*full"
        ):
            actor.deliver(items[1], make_group(items[1]))
    for item in items[1:]:
        assert actor.deliver(item, make_group(item))
    assert len(store.wait(0, 1.0)) == 3
    assert len(list(step_folder(store.folder, 0).glob("groups/*"))) == 2


def _full():
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_group_that_does_not_answer_its_item_is_refused(store):
    item, other = make_items(0, 2, version=3)
    store.plan([item, other])
    group = make_group(item)
    for wrong, words in (
        (make_group(other), r"\(task_id, group, index\)"),
        (
            dataclasses.replace(group, trajectories=group.trajectories[:1]),
            "1 trajectories instead of 2",
        ),
        (
            dataclasses.replace(group, trajectories=group.trajectories[::-1]),
            r"\(task_id, group, index\)",
        ),
        (make_group(dataclasses.replace(item, version=2)), r"versions \(2,\) instead of 3"),
    ):
        with pytest.raises(ValueError, match=rf"item \(0, 0\): .*{words}"):
            store.deliver(item, wrong)
    assert store.missing(0) == [item, other]


def test_continuations_are_recorded_with_their_group_and_checked_like_it(store):
    (item,) = make_items(0, 1, version=3)
    store.plan([item])
    group = make_group(item)
    parted = dataclasses.replace(group.trajectories[1], index=7, fork=Fork(1, 1, (40,)))
    bare = group_records.encode(0, 0, store.process.identity, 0.0, group)
    assert b"continuations" not in bare and b"fork" not in bare
    later = dataclasses.replace(
        parted, contexts=make_group(dataclasses.replace(item, version=4)).trajectories[1].contexts
    )
    for wrong, words in (
        ((dataclasses.replace(parted, index=1),), "continuation 1 is there twice"),
        ((parted, parted), "continuation 7 is there twice"),
        ((dataclasses.replace(parted, fork=None),), "parts nowhere"),
        ((dataclasses.replace(parted, group=9),), "of a continuation, instead of the group's"),
        ((later,), r"versions \(3, 4\) instead of 3"),
    ):
        with pytest.raises(ValueError, match=words):
            store.deliver(item, dataclasses.replace(group, continuations=wrong))
    whole = dataclasses.replace(group, continuations=(parted,))
    store.deliver(item, whole)
    (record,) = store.read(0)
    assert identical(record.group, whole) and record.group.continuations[0].fork == parted.fork
    store.consume(0, [record], version=0)
    # half of 64 tokens of each trajectory, and of the continuation those behind place 40
    assert store.consumption(0)["sampled"] == 32 + 32 + 24


def test_a_damaged_group_is_named_and_can_be_sampled_again(store):
    items = make_items(0, 2)
    store.plan(items)
    for item in items:
        store.deliver(item, make_group(item))
    (path,) = step_folder(store.folder, 0).glob("groups/*")
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    words = r"groups/learner\.0\.0 from byte \d+ on is damaged: it has changed since"
    for read in (lambda: store.read(0), lambda: store.wait(0, 0.2), lambda: store.record(0, 1)):
        with pytest.raises(StoreError, match=words):
            read()
    assert store.deliver(items[1], make_group(items[1]))
    assert len(store.wait(0, 1.0)) == 2


def test_a_group_in_another_ones_place_is_noticed(store):
    items = make_items(0, 2)
    store.plan(items)
    for item in items:
        store.deliver(item, make_group(item))
    places = RecordReader(store.folder)._arrived(0).look()
    content = taken_bytes([places[1], places[0]])
    taken_path(store.folder, 0, 0).write_bytes(content)
    with pytest.raises(StoreError, match=r"from byte \d+ on holds the group of item \(0, 1\)"):
        GroupStore(store.folder).record(0, 0)


def test_a_link_whose_answer_was_lost_counts_as_made(store, monkeypatch):
    items = make_items(0, 2)
    link = os.link

    def answer_lost(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", answer_lost)
    assert store.plan(items) and store.missing(0) == items


# --- Waiting and consuming ------------------------------------------------------------------------


def test_waiting_ends_when_the_last_group_arrives(store):
    items = make_items(0, 3)
    store.plan(items)

    def deliver():
        for item in reversed(items):
            time.sleep(0.1)
            store.deliver(item, make_group(item))

    thread = threading.Thread(target=deliver, daemon=True)
    thread.start()
    records = store.wait(0, 30.0)
    thread.join()
    assert [record.number for record in records] == [0, 1, 2]
    for item, record in zip(items, records, strict=True):
        assert identical(record.group, make_group(item))


def test_waiting_and_reading_name_what_is_missing(store):
    items = make_items(0, 3)
    store.plan(items)
    store.deliver(items[1], make_group(items[1]))
    with pytest.raises(
        StoreTimeout, match=r"step 0 lacks 2 of 3 groups after 0.1 s .*\(0, 0\) unclaimed"
    ) as caught:
        store.wait(0, 0.1)
    assert [missing.item for missing in caught.value.missing] == [items[0], items[2]]
    with pytest.raises(StoreError, match=r"step 0 lacks \(0, 0\), \(0, 2\)"):
        store.read(0)
    step_folder(store.folder, 1).mkdir()  # killed before the plan was in it
    for use in (
        lambda: store.wait(1, 0.1),
        lambda: store.read(2),
        lambda: store.consume(1, [], version=1),
    ):
        with pytest.raises(StoreError, match=r"step [12] is not planned"):
            use()
    with pytest.raises(ValueError, match=r"numbers=\[3\] of step 0 must be in \[0, 3\)"):
        store.wait(0, 0.1, [3])


def test_a_step_is_consumed_again_only_by_the_same(store):
    run_steps(store, range(1))
    records = store.read(0)
    again = GroupStore(store.folder, "learner")
    assert not again.consume(0, records, version=0)
    with pytest.raises(
        StoreError, match=r"consumed otherwise by learner/0, in .*: version = 0 there, 1 here"
    ):
        again.consume(0, records, version=1)
    with pytest.raises(StoreError, match="weights = None there, abc here"):
        again.consume(0, records, version=0, weights="abc")
    with pytest.raises(StoreError, match=r"groups \[1\] are others"):
        again.consume(0, [records[0], dataclasses.replace(records[1], digest="0")], version=0)
    with pytest.raises(ValueError, match="step 0 consists of"):
        again.consume(0, records[::-1], version=0)
    with pytest.raises(ValueError, match="step 0 consists of"):
        again.consume(0, records[:1], version=0)


def test_steps_are_consumed_in_order(store):
    items = {step: make_items(step, 1) for step in (7, 8)}
    for step in items:
        store.plan(items[step])
        store.deliver(items[step][0], make_group(items[step][0]))
    with pytest.raises(StoreError, match="step 8 cannot be consumed before step 7"):
        store.consume(8, store.read(8), version=8)
    for step in items:
        assert store.consume(step, store.read(step), version=step)
    assert store.consumed() == [7, 8]


# --- The folder -----------------------------------------------------------------------------------


def test_a_store_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        StoreError, match=r"could not list .*gone/steps: there is no such .*MiB free"
    ):
        GroupStore(tmp_path / "gone")
    with pytest.raises(StoreError, match="could not make the store's folder"):
        GroupStore(tmp_path / "not mounted" / "store", "learner")


def test_a_store_that_is_deleted_under_its_users_is_named(store):
    (item,) = make_items(0, 1)
    store.plan([item])
    shutil.rmtree(store.folder)
    for use in (
        lambda: store.deliver(item, make_group(item)),
        lambda: store.plan(make_items(1, 1)),
        lambda: store.wait(0, 1.0),
        lambda: store.consume(0, [], version=0),
        lambda: store.consumed(),
    ):
        with pytest.raises(StoreError, match="was the store deleted or unmounted"):
            use()
    assert not store.folder.exists()


def test_what_an_earlier_incarnation_was_writing_is_deleted_and_nothing_else(store):
    folder = store.folder / "processes"
    GroupStore(store.folder, "actor")
    for name in ("learner/aside.0.7", "actor/aside.0.7"):
        (folder / name).write_bytes(b"half")
    assert GroupStore(store.folder, "learner").process.identity == ("learner", 1)
    assert GroupStore(store.folder, "learner").process.identity == ("learner", 2)
    assert sorted(str(path.relative_to(folder)) for path in folder.glob("*/*")) == [
        "actor/0.json",
        "actor/aside.0.7",
        "learner/2.json",
    ]


def test_writing_needs_a_name_that_can_be_a_file(store):
    with pytest.raises(ValueError, match="opened without a name"):
        GroupStore(store.folder).plan(make_items(0, 1))
    for name in ("", "a/b", "..", "x" * 101):
        with pytest.raises(ValueError, match="name="):
            GroupStore(store.folder, name)


# --- Grain ----------------------------------------------------------------------------------------


def test_consumed_groups_are_a_grain_dataset_in_order(store):
    for step, count in enumerate((2, 3, 1)):
        run_steps(store, [step], count)
    store.plan(make_items(3, 1))
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert store.places() == places
    data = dataset(store.folder, store.places())
    assert [(data[i].step, data[i].number) for i in range(len(data))] == places
    shuffled = data.shuffle(seed=1).to_iter_dataset(grain.ReadOptions(num_threads=2))
    assert sorted((record.step, record.number) for record in shuffled) == places
    assert [record.number for record in dataset(store.folder, store.places([1]))] == [0, 1, 2]
    source = pickle.loads(pickle.dumps(RecordSource(store.folder, store.places([2, 0]))))
    assert [source[i].step for i in range(3)] == [2, 0, 0]
    for index in (-1, 3):
        with pytest.raises(IndexError):
            source[index]
    with pytest.raises(StoreError, match=r"consumed\.json"):
        store.places([3])
