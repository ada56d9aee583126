"""A record holds all of its group, and notices when a byte of it changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.store import group_records
from rl_code.store.errors import StoreError
from rl_code.store.processes import ProcessId
from rl_code.types import Group, Reward
from tests.rl_code.store.groups import identical, make_group, make_items, make_trajectory
from tests.rl_code.trajectories import with_context

ACTOR = ProcessId("actor-0", 3)
(ITEM,) = make_items(5, 1)
BITS = st.integers(0, 2**32 - 1)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_groups_come_back_bit_for_bit(data):
    task = dataclasses.replace(
        make_group(ITEM).task, id=data.draw(st.text()), prefill=data.draw(st.text())
    )
    members = []
    for index in range(data.draw(st.integers(0, 3))):
        length = data.draw(st.integers(0, 9))
        bits = np.array(data.draw(st.lists(BITS, min_size=length, max_size=length)), np.uint32)
        total = data.draw(st.floats())
        members.append(
            dataclasses.replace(
                with_context(
                    make_trajectory(
                        task,
                        4,
                        index,
                        np.arange(length),
                        data.draw(st.integers(-(2**31), 2**31 - 1)),
                    ),
                    logprobs=bits.view(np.float32),
                    sampled=bits % 2 == 0,
                    parent=data.draw(st.integers(-1, 3)),
                    kept=data.draw(st.integers(0, 9)),
                ),
                reward=Reward(
                    total,
                    {data.draw(st.text()): total},
                    tuple(data.draw(st.lists(st.text(), max_size=2))),
                ),
            )
        )
    group = Group(task, tuple(members))
    record = group_records.decode(group_records.encode(5, 2, ACTOR, 12.5, group), "x")
    assert identical(record.group, group)
    assert (record.step, record.number, record.actor, record.when) == (5, 2, ACTOR, 12.5)
    used = {int(version) for member in members for version in member.versions[member.sampled]}
    assert record.versions == tuple(sorted(used))


def test_the_digest_is_of_the_group_alone():
    one, again, other = (
        group_records.decode(group_records.encode(*place, make_group(ITEM, seconds=seconds)), "x")
        for *place, seconds in (
            (5, 0, ACTOR, 1.0, 0.5),
            (6, 1, ProcessId("b", 0), 2.0, 0.5),
            (5, 0, ACTOR, 1.0, 0.75),
        )
    )
    assert one.digest == again.digest != other.digest


def test_every_flipped_byte_and_every_cut_is_noticed_and_named():
    data = group_records.encode(5, 0, ACTOR, 1.0, make_group(ITEM, length=4))
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 + place % 255
        with pytest.raises(StoreError, match=r"group_000000\.record is damaged"):
            group_records.decode(bytes(flipped), "group_000000.record")
        with pytest.raises(StoreError, match=r"group_000000\.record is damaged"):
            group_records.decode(data[:place], "group_000000.record")


def test_another_schema_is_named(monkeypatch):
    monkeypatch.setattr(group_records, "SCHEMA", 2)
    data = group_records.encode(5, 0, ACTOR, 1.0, make_group(ITEM))
    monkeypatch.undo()
    with pytest.raises(StoreError, match="schema 2; this code reads schema 1"):
        group_records.decode(data, "x")
