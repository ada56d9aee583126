"""A sound store has no problems, and each way to break one is found."""

from __future__ import annotations

import dataclasses
import re
import shutil

import pytest

from rl_code.store import group_records
from rl_code.store.audit import check
from rl_code.store.sealed import seal
from rl_code.store.steps import step_folder
from rl_code.store.store import GroupStore
from tests.rl_code.store.groups import as_files, group_path, make_group, make_items, put_group


@pytest.fixture
def folder(tmp_path):
    """Three steps consumed, each sampled one version before; a fourth has one of two groups."""
    store = GroupStore(tmp_path / "store", "learner")
    for step in range(4):
        items = make_items(step, 2, version=max(0, step - 1))
        store.plan(items)
        for item in items[: 1 if step == 3 else 2]:
            store.deliver(item, make_group(item))
        if step < 3:
            store.consume(step, store.read(step), version=step)
    as_files(store.folder)
    return store.folder


def rewrite_consumption(folder, step, **changes):
    path = step_folder(folder, step) / "consumed.json"
    path.write_bytes(seal(GroupStore(folder).consumption(step) | changes))


def redeliver(folder, item, group):
    """Puts a sound record of another group in an item's place."""
    who = GroupStore(folder, "forger").process.identity
    data = group_records.encode(item.step, item.number, who, 0.0, group)
    put_group(folder, item.step, item.number, data)


def test_a_sound_store_has_no_problems(folder):
    report = check(folder, max_staleness=1)
    assert report.problems == []
    assert (report.steps, report.consumed, report.groups, report.waiting, report.takeovers) == (
        4,
        3,
        6,
        1,
        0,
    )
    assert report.staleness_max == 1
    assert check(folder, max_staleness=0).problems != []


def test_groups_that_only_choose_tasks_may_be_old(tmp_path):
    store = GroupStore(tmp_path / "store", "learner")
    items = make_items(0, 1, kind="screen", version=2) + make_items(0, 1, first=1, version=7)
    store.plan(items)
    for item in items:
        store.deliver(item, make_group(item))
    store.consume(0, store.read(0), version=7)
    report = check(store.folder, max_staleness=0)
    assert report.problems == [] and report.staleness_max == 0


def flip(folder):
    path = group_path(folder, 1, 0)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def copy_group(folder):
    item = GroupStore(folder).items(2)[0]
    group = GroupStore(folder).record(2, 1).group
    redeliver(folder, item, group)


def too_old(folder):
    rewrite_consumption(folder, 2, version=3)


def from_the_future(folder):
    rewrite_consumption(folder, 2, version=0)


def resampled(folder):
    item = GroupStore(folder).items(1)[1]
    redeliver(folder, item, make_group(item, seconds=9.0))


def unplanned(folder):
    item = GroupStore(folder).items(3)[0]
    redeliver(folder, dataclasses.replace(item, number=5), make_group(item))


def wrong_version(folder):
    item = GroupStore(folder).items(3)[0]
    redeliver(folder, item, make_group(dataclasses.replace(item, version=1)))


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (flip, r"apart-0\.0\.0 from byte 0 on is damaged"),
        (copy_group, r"item \(2, 1\) has the same group as item \(2, 0\)"),
        (too_old, r"item \(2, 0\) was consumed at version 3 and sampled by versions \(1,\); the bound is 1"),
        (from_the_future, r"item \(2, 0\) was consumed at version 0 and sampled by versions \(1,\)"),
        (resampled, r"item \(1, 1\): the group consumed is another one"),
        (wrong_version, r"group of item \(3, 0\) does not answer it: sampled by versions \(1,\) instead of 2"),
        (lambda folder: group_path(folder, 1, 1).unlink(), r"item \(1, 1\) was consumed and its group is not there"),
        (lambda folder: rewrite_consumption(folder, 1, digests=[]), "step 1: 0 groups were consumed, 2 planned"),
        (lambda folder: (step_folder(folder, 1) / "consumed.json").unlink(), "step 2 is consumed and step 1 before it"),
        (lambda folder: (step_folder(folder, 1) / "consumed.json").write_bytes(b"{}"), r"consumed\.json is damaged"),
        (lambda folder: (step_folder(folder, 1) / "plan_000000.json").write_bytes(b""), "plan_000000.json is damaged"),
        (lambda folder: shutil.rmtree(step_folder(folder, 1)), "steps are missing between 0 and 3"),
        (unplanned, r"step 3: groups \[5\] are in no plan"),
    ],
)  # fmt: skip
def test_what_is_broken_is_found(folder, breakage, words):
    breakage(folder)
    assert re.search(words, "\n".join(check(folder, max_staleness=1).problems))
