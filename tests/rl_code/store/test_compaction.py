"""Consumed steps move into shards: every group stays what was delivered, bit for bit, and is found
by whoever looks for it, before, while and after it moves.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.store import group_records, packing, shards, usage
from rl_code.store.audit import check
from rl_code.store.claims import Claims, WorkConfig
from rl_code.store.compaction import Compaction
from rl_code.store.errors import StoreError
from rl_code.store.processes import ProcessId
from rl_code.store.reader import RecordReader
from rl_code.store.source import RecordSource, dataset, read_ahead
from rl_code.store.steps import step_folder
from rl_code.store.store import GroupStore
from tests.rl_code.store.groups import as_files, group_path, identical, make_group, make_items

WORK = WorkConfig(heartbeat_s=0.05, heartbeat_timeout_s=1.0, stall_s=20.0, deadline_s=60.0)


def fill(store, steps, per_step=3, length=32):
    """Steps that are planned, claimed, delivered and consumed."""
    for step in steps:
        items = make_items(step, per_step, version=step)
        store.plan(items)
        for item in items:
            store.deliver(item, make_group(item, length=length))
        store.consume(step, store.read(step), version=step, weights=f"w{step}")


def compact(store, shard_steps=4, **how):
    Compaction(store.process, store.folder, shard_steps).run(**how)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here
    return GroupStore(tmp_path / "store", "learner")


def contents(folder):
    """Everything a reader tells of a store."""
    reader = RecordReader(folder)
    found = {}
    for step in reader.steps():
        listing = reader.listing(step)
        found[step] = (
            (listing.parts, listing.consumed, reader.claims(step)),
            reader.items(step),
            listing.consumed and reader.consumption(step),
        )
        for number in reader.groups(step):
            found[step, number] = reader.group_file(step, number)[0]
    return found


# --- Packing --------------------------------------------------------------------------------------


@given(st.binary(max_size=300), st.booleans())
def test_packing_gives_back_any_bytes(data, with_start):
    (item,) = make_items(0, 1)
    start = group_records.encode(0, 0, ProcessId("a", 0), 0.0, make_group(item, length=4))
    data = start[: group_records.START] + data if with_start else data
    assert packing.unpack(packing.pack(data)) == data


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 70), st.integers(0, 2**40), st.integers(1, 3))
def test_packing_gives_back_groups_and_puts_arrays_together(length, step, members):
    (item,) = make_items(step, 1, group_size=members)
    group = make_group(item, length=length)
    data = group_records.encode(step, 0, ProcessId("a", 3), 1.5, group)
    packed = packing.pack(data)
    assert packing.unpack(packed) == data
    assert packed != packing.msgpack.packb([data])


@given(st.binary(max_size=40))
def test_what_is_not_packed_is_named(data):
    try:
        packing.unpack(data)
    except ValueError as error:
        assert str(error).startswith("not a packed group: ")


# --- Moving ---------------------------------------------------------------------------------------


def test_a_moved_step_reads_as_it_did(store):
    fill(store, range(6))
    before = contents(store.folder)
    audit = check(store.folder, 0)
    compact(store)
    assert [path.name for path in (store.folder / "shards").iterdir()] == [
        "00000000_00000003.arrayrecord"
    ]
    assert sorted(path.name for path in (store.folder / "steps").iterdir()) == [
        "00000004",
        "00000005",
    ]
    assert contents(store.folder) == before and check(store.folder, 0) == audit
    compact(store, rest=True)
    compact(store, rest=True)
    assert contents(store.folder) == before and check(store.folder, 0) == audit
    assert not list((store.folder / "steps").iterdir())
    assert store.consumed() == list(range(6)) and len(store.places()) == 18
    assert list(store.folder.rglob("aside*")) == []


def test_random_access_and_grain_read_shards(store):
    fill(store, range(5))
    compact(store)
    places = [(step, number) for step in range(5) for number in range(3)]
    shuffled = random.Random(0).sample(places, len(places))
    for record, place in zip(read_ahead(store.folder, shuffled), shuffled, strict=True):
        (item,) = make_items(place[0], 1, first=place[1], version=place[0])
        assert (record.step, record.number) == place
        assert identical(record.group, make_group(item, length=32))
    source = pickle.loads(pickle.dumps(RecordSource(store.folder, shuffled)))
    assert [source[i].number for i in range(len(source))] == [number for _, number in shuffled]
    assert len(list(dataset(store.folder, places).to_iter_dataset())) == len(places)


def test_a_learner_that_repeats_moved_steps_gets_the_same_groups(store):
    fill(store, range(4))
    records = store.read(2)
    compact(store)
    again = GroupStore(store.folder, "learner")
    items = make_items(2, 3, version=2)
    assert not again.plan(items)
    again.await_plan(items, 0.1)
    found = again.wait(2, 0.1)
    assert [record.digest for record in found] == [record.digest for record in records]
    assert not again.consume(2, found, version=2, weights="w2")
    with pytest.raises(StoreError, match="weights = w2 there, other here"):
        again.consume(2, found, version=2, weights="other")
    with pytest.raises(StoreError, match="another plan of step 2 stands in"):
        again.plan(make_items(2, 3, version=1))
    fill(again, [4])  # and goes on after them


def test_an_actor_that_slept_finds_its_step_moved(store):
    items = make_items(0, 2)
    store.plan(items)
    sleeper = GroupStore(store.folder, "sleeper")
    with Claims(sleeper, WORK) as work:
        held = work.claim(1)
        for item in items:
            store.deliver(item, make_group(item))
        store.consume(0, store.read(0), version=0)
        compact(store, rest=True)
        assert not sleeper.deliver(held[0], make_group(held[0], seconds=9.0))
        assert sleeper.late == 1 and sleeper.is_consumed(0)
        assert not work._boards[0]._claim(held[0].number, 1)
        assert work.claim(1) == []
        store.plan(make_items(1, 1))
        assert len(work.claim(1)) == 1
    assert check(store.folder, 0).problems == []


def test_asking_for_steps_that_are_not_there_lists_no_folder_that_grows(store, monkeypatch):
    monkeypatch.setattr(shards, "_COARSE_S", 0.0)
    fill(store, range(4))
    reader = RecordReader(store.folder)
    listed = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
    assert reader.listing(9) is None
    for _ in range(3):
        listed.clear()
        assert reader.listing(9) is None and listed == [step_folder(store.folder, 9)]
    compact(store, 2)  # what comes into the folder of shards is found
    for step in range(4):
        assert reader.listing(step).consumed
    listed.clear()
    assert reader.listing(9) is None and listed == [step_folder(store.folder, 9)]


def test_takeovers_are_counted_after_a_step_moved(store):
    (item,) = make_items(0, 1)
    store.plan([item])
    with Claims(GroupStore(store.folder, "a"), WORK) as work:
        assert work.claim(1)
    with Claims(GroupStore(store.folder, "b"), WORK) as work:
        assert work.claim(1) and work.takeovers == 1
    store.deliver(item, make_group(item))
    store.consume(0, store.read(0), version=0)
    compact(store, rest=True)
    assert store.takeovers(0) == check(store.folder, 0).takeovers == 1


def test_steps_that_are_read_while_they_move_are_whole(store):
    fill(store, range(12), per_step=2, length=8)
    before = contents(store.folder)
    places = [place for place in before if isinstance(place, tuple)]
    done = threading.Event()
    seen = []

    def read():
        reader = RecordReader(store.folder)
        rng = random.Random(1)
        while not done.is_set():
            step, number = rng.choice(places)
            listing = reader.listing(step)
            assert (listing.parts, listing.consumed) == ((0,), True)
            assert reader.groups(step) == {0, 1}
            assert reader.group_file(step, number)[0] == before[step, number]
            assert len(GroupStore(store.folder).items(step)) == 2
            seen.append(step)
            time.sleep(0.0005)

    failed = []
    threads = [threading.Thread(target=_noting(failed, read), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    compaction = Compaction(store.process, store.folder, 1)
    for steps in (range(2), range(5), range(12)):
        compaction._compact([step for step in steps if not store.reader.moved(step)])
    done.set()
    for thread in threads:
        thread.join(60)
    assert not failed and len(seen) > 10


def _noting(failed, use):
    def run():
        try:
            use()
        except BaseException as error:  # whatever it is, the test must see it
            failed.append(error)

    return run


# --- Damage ---------------------------------------------------------------------------------------


def test_a_step_with_a_damaged_file_stays_in_its_folder(store):
    fill(store, range(4))
    as_files(store.folder)
    path = group_path(store.folder, 2, 1)
    sound = path.read_bytes()
    data = bytearray(sound)
    data[-9] ^= 1
    path.write_bytes(data)
    compaction = Compaction(store.process, store.folder, 4)
    compaction.run()
    assert sorted(path.name for path in (store.folder / "steps").iterdir()) == ["00000002"]
    with pytest.raises(
        StoreError, match=r"00000002/groups/apart-1\.0\.0 from byte 0 on is damaged"
    ):
        store.read(2)
    assert check(store.folder, 0).consumed == 4
    path.write_bytes(sound)  # restored
    compact(store)
    assert not list((store.folder / "steps").iterdir())
    assert check(store.folder, 0).problems == []


def test_any_damaged_byte_of_a_shard_is_noticed_where_it_matters(store, tmp_path):
    fill(store, range(4))
    before = contents(store.folder)
    compact(store)
    (path,) = (store.folder / "shards").iterdir()
    sound = path.read_bytes()
    rng = random.Random(0)
    spots = [rng.randrange(len(sound)) for _ in range(30)] + list(range(0, 400, 13))
    noticed = 0
    for spot in [*spots, None]:
        damaged = bytearray(sound)
        if spot is None:
            del damaged[-1:]
        else:
            damaged[spot] ^= 1 << rng.randrange(8)
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(store.folder, copy)
        (copy / "shards" / path.name).write_bytes(damaged)
        try:
            assert contents(copy) == before
        except StoreError as error:
            noticed += 1
            assert str(copy / "shards" / path.name) in str(error) and "damaged" in str(error)
    assert noticed > 10


def test_a_shard_of_another_schema_is_named(store, monkeypatch):
    fill(store, [0])
    with monkeypatch.context() as patch:
        patch.setattr(shards, "SCHEMA", 7)
        compact(store, rest=True)
    with pytest.raises(StoreError, match="has schema 7; this code reads schema 1"):
        RecordReader(store.folder).steps()


def test_a_shard_that_cannot_be_written_leaves_the_folders(store, monkeypatch):
    fill(store, range(2))
    before = contents(store.folder)
    write = shards.ArrayRecordWriter.write

    def full(writer, record):
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(shards.ArrayRecordWriter, "write", full)
    with pytest.raises(StoreError, match=r"could not write the shard of steps 0 to 1 .*No space"):
        compact(store, 2)
    assert contents(store.folder) == before and list(store.folder.rglob("aside*")) == []

    def lost(writer, record):
        write(writer, record[:-1] if len(record) > 500 else record)

    monkeypatch.setattr(shards.ArrayRecordWriter, "write", lost)
    with pytest.raises(StoreError, match=r"does not hold what was written|is damaged"):
        compact(store, 2)
    assert contents(store.folder) == before


# --- Disk -----------------------------------------------------------------------------------------


def test_a_hundred_steps_are_a_handful_of_files(store):
    fill(store, range(100), per_step=2, length=16)
    before = usage.measure(store.folder)
    compact(store, 25)
    after = usage.measure(store.folder)
    assert before.files_per_100_steps > 400 and after.files_per_100_steps < 10
    assert (after.steps, after.tokens, after.sampled) == (
        before.steps,
        before.tokens,
        before.sampled,
    )
    assert after.tokens == 100 * 2 * 2 * 16 and after.sampled == after.tokens // 2
    assert after.mb_per_mtokens < before.mb_per_mtokens / 3


def test_a_left_folder_is_deleted_and_never_read(store):
    fill(store, range(2))
    before = contents(store.folder)
    left = store.folder.with_name("left")
    shutil.copytree(step_folder(store.folder, 1), left)
    compact(store, 2)
    (left / "consumed.json").write_text(json.dumps("torn"))
    shutil.copytree(left, step_folder(store.folder, 1))
    assert contents(store.folder) == before
    compact(GroupStore(store.folder, "learner"), 2)
    assert not step_folder(store.folder, 1).exists() and contents(store.folder) == before
