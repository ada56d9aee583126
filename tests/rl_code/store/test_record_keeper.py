"""A run's record is put into shards while it grows; what is kept can always be made again
from a checkpoint that is kept.
"""

from __future__ import annotations

import logging
import os

import pytest

from rl_code.checkpoint import record as checkpoint_record
from rl_code.checkpoint.record import Record, folder_of
from rl_code.config.read_config import ConfigError, build
from rl_code.store import compaction as compaction_lib
from rl_code.store.audit import check
from rl_code.store.errors import StoreError
from rl_code.store.record_keeper import RecordConfig, RecordKeeper
from rl_code.store.store import GroupStore
from tests.rl_code.repeatable import RECORD
from tests.rl_code.store.test_compaction import fill


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    """Nobody cuts the power here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def commit(workdir, step, keep):
    """A checkpoint as far as ``record.keep`` sees it, and the deletion of those that are surplus."""
    folder = folder_of(workdir / "checkpoints", step)
    folder.mkdir(parents=True)
    checkpoint_record.write(folder, Record(step, {}, {}, {}, {}, None, {}))
    for other in checkpoint_record.surplus(workdir / "checkpoints", keep):
        checkpoint_record.remove(folder_of(workdir / "checkpoints", other))


def settle(keeper):
    """Waits for what the keeper's thread has been given."""
    keeper._thread.submit(lambda: None).result()


def run(workdir, config, steps, every=2, keep=1):
    """Steps of a run from where its newest checkpoint is; yields after each one."""
    store = GroupStore(workdir / "store", "learner")
    start = max(checkpoint_record.steps(workdir / "checkpoints"), default=0)
    with RecordKeeper(store, workdir, config) as keeper:
        for step in range(start, steps):
            if not store.is_consumed(step):
                fill(store, [step], per_step=1, length=8)
            keeper.consumed(step)
            if (step + 1) % every == 0:
                commit(workdir, step + 1, keep)
                keeper.saved(step + 1)
            settle(keeper)
            yield step + 1, store
        keeper.finish()


@pytest.mark.parametrize(
    ("keep", "shard_steps", "every"), [(5, 2, 2), (8, 3, 4), (1, 5, 2), (4, 1, 3), (6, 4, 1)]
)
@pytest.mark.quick(first=2)
def test_what_is_kept_begins_at_a_checkpoint_that_is_kept(tmp_path, keep, shard_steps, every):
    config = RecordConfig(shard_steps=shard_steps, keep=keep)
    removed_once = False
    for done, store in run(tmp_path, config, 40, every):
        kept = store.reader.steps()
        committed = checkpoint_record.steps(tmp_path / "checkpoints")
        assert kept == list(range(kept[0], done)) and len(kept) >= min(keep, done)
        assert len(kept) <= 2 * max(keep, shard_steps) + 2 * shard_steps + 2 * every
        assert len(committed) <= 3
        if removed := store.reader.removed():
            removed_once = True
            assert removed.before == kept[0] and removed.keep == keep
            # training can go on from a checkpoint with groups that are all there
            assert any(kept[0] <= step <= kept[0] + shard_steps for step in committed)
    assert removed_once
    report = check(tmp_path / "store", 0)
    assert report.problems == [] and report.removed == store.reader.removed()


def test_reading_what_was_removed_says_so(tmp_path, caplog):
    config = RecordConfig(shard_steps=2, keep=4)
    with caplog.at_level(logging.INFO, logger="absl"):
        *_, (_, store) = run(tmp_path, config, 20)
    before = store.reader.removed().before
    assert before >= 8
    words = (
        f"the steps before {before} were removed from the record: "
        r"record.keep = 4 in the config of the run"
    )
    assert words in caplog.text
    for use in (
        lambda: store.read(1),
        lambda: store.record(1, 0),
        lambda: store.consumption(1),
        lambda: store.items(1),
        lambda: store.places([1]),
        lambda: store.wait(1, 0.1),
        lambda: fill(store, [1]),
    ):
        with pytest.raises(StoreError) as caught:
            use()
        assert words in str(caught.value)


def test_everything_is_kept_unless_the_config_says_otherwise(tmp_path):
    *_, (_, store) = run(tmp_path, RecordConfig(shard_steps=4), 18)
    assert store.reader.steps() == list(range(18)) and store.reader.removed() is None
    assert checkpoint_record.pinned(tmp_path / "checkpoints") == []
    assert len(list((tmp_path / "store" / "shards").iterdir())) == 5
    assert not list((tmp_path / "store" / "steps").iterdir())


def test_a_run_that_is_stopped_and_started_keeps_the_same(tmp_path):
    config = RecordConfig(shard_steps=2, keep=5)
    for name, stops in (("whole", [30]), ("stopped", [7, 8, 15, 22, 30])):
        for stop in stops:
            (tmp_path / name).mkdir(exist_ok=True)
            list(run(tmp_path / name, config, stop))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    kept = [GroupStore(folder / "store").reader.steps()[-5:] for folder in (whole, stopped)]
    assert kept[0] == kept[1] == list(range(25, 30))
    for folder in (whole, stopped):
        assert check(folder / "store", 0).problems == []
        first = GroupStore(folder / "store").reader.removed().before
        assert 0 < first <= 25


def test_removal_that_was_interrupted_is_finished(tmp_path, monkeypatch):
    config = RecordConfig(shard_steps=2, keep=4)
    with monkeypatch.context() as patch:
        patch.setattr(compaction_lib.Compaction, "delete_removed", lambda self: None)
        *_, (_, store) = run(tmp_path, config, 20)
    left = len(list((tmp_path / "store" / "shards").glob("*.arrayrecord")))
    before = store.reader.removed().before
    assert store.reader.steps() == list(range(before, 20)) and left == 10
    *_, (_, store) = run(tmp_path, config, 21)
    assert len(list((tmp_path / "store" / "shards").glob("*.arrayrecord"))) < left
    assert check(tmp_path / "store", 0).problems == []


def test_storage_that_fails_is_logged_and_tried_again(tmp_path, monkeypatch, caplog):
    config = RecordConfig(shard_steps=2)
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError("No space left on device")

        patch.setattr(compaction_lib.shards, "write", full)
        *_, (_, store) = run(tmp_path, config, 5)
    assert "will be later: could not write the shard of steps 0 to 1" in caplog.text
    assert store.consumed() == list(range(5))
    assert not list((tmp_path / "store" / "shards").iterdir())
    *_, (_, store) = run(tmp_path, config, 6)
    assert not list((tmp_path / "store" / "steps").iterdir())
    assert store.consumed() == list(range(6))


def test_metrics_say_what_the_record_takes(tmp_path):
    store = GroupStore(tmp_path / "store", "learner")
    with RecordKeeper(store, tmp_path, RecordConfig(shard_steps=2)) as keeper:
        assert keeper.metrics() == {}
        fill(store, range(2))
        keeper.consumed(1)
        settle(keeper)
        found = keeper.metrics()
        assert found.keys() == RECORD
        assert found["record/steps"] == 2 and found["record/files"] == 2
        assert found["record/mb"] * 1e6 / (2 * 3 * 2 * 32) == found["record/mb_per_mtokens"]
    # a process of the learner that does not write the store
    with RecordKeeper(GroupStore(tmp_path / "store"), tmp_path, RecordConfig()) as keeper:
        keeper.consumed(24)
        keeper.saved(25)
        keeper.finish()
        assert keeper.metrics() == {}


def test_wrong_settings_are_named():
    for wrong, words in ((dict(keep=0), "keep=0 must be at least 1"), (dict(kept=1), "keep")):
        with pytest.raises(ConfigError, match=words):
            build(RecordConfig, wrong, "config.record")
