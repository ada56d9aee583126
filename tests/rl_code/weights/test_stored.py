"""Properties of weights on shared storage: complete or absent, exact, and honest about damage."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from pathlib import Path

import jax
import pytest

from rl_code.host import files
from rl_code.weights import codec, version_records
from rl_code.weights.layout import sampling_model
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.versions import WeightError, WeightsConfig, WeightTimeout
from tests.rl_code.weights.learner import Learner
from tests.rl_code.weights.small import CONFIG, DTYPE, KEPT, assert_is, mesh, model_of, wanted


def learner(workdir: Path, **changes) -> StoredPublisher:
    return StoredPublisher(workdir, DTYPE, WeightsConfig(**(vars(KEPT) | changes)))


def actor(workdir: Path, where=None) -> StoredSubscriber:
    return StoredSubscriber(workdir, wanted(where or mesh()), name="actor-1")


def publish(workdir: Path, *versions: int, **changes) -> None:
    publisher = learner(workdir, **changes)
    for version in versions:
        publisher.publish(version, model_of(version, mesh()))
    publisher.close()


def kinds(workdir: Path) -> dict[int, str]:
    """What is stored of each version."""
    folder = workdir / "weights"
    found = {}
    for number in version_records.numbers(folder):
        record = version_records.read_record(folder, number)
        assert (record.full_bytes > 0) == (
            version_records.data_folder(folder, number) / "full"
        ).exists()
        assert (record.delta_bytes > 0) == (
            version_records.data_folder(folder, number) / "delta"
        ).exists()
        found[number] = "full" * (record.full_bytes > 0) + "delta" * (record.delta_bytes > 0)
    return found


def data_files(workdir: Path, number: int, kind: str) -> list[Path]:
    folder = version_records.data_folder(workdir / "weights", number) / kind
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_every_version_comes_back_in_full_or_by_its_changes(tmp_path):
    publisher = learner(tmp_path, keep=9)
    where = mesh(1, 2)
    follower = actor(tmp_path, mesh(2, 2))
    layout = mesh(2, 2)
    routes = []
    for version in range(5):
        publisher.publish(version, model_of(version, where))
        number, model = follower.wait(at_least=version, deadline_s=30.0)
        assert number == version == follower.newest()
        assert_is(model, version, layout)
        routes.append((follower.fetched.full_bytes > 0, follower.fetched.delta_bytes > 0))
    publisher.close()
    assert kinds(tmp_path) == {0: "full", 1: "delta", 2: "delta", 3: "fulldelta", 4: "delta"}
    assert routes == [(True, False)] + [(False, True)] * 4
    for version in range(5):
        assert_is(actor(tmp_path).wait(exactly=version, deadline_s=30.0)[1], version, mesh())
    assert (
        publisher.published.version == 4
        and publisher.published.delta_bytes == follower.fetched.delta_bytes
    )
    # what is held already is not read again
    assert_is(follower.wait(at_least=4, deadline_s=30.0)[1], 4, layout)
    assert follower.fetched.full_bytes == follower.fetched.delta_bytes == 0


def test_the_newest_stay_and_what_they_are_made_from(tmp_path):
    publisher = learner(tmp_path, full_every=3, keep=2)
    kept = []
    for version in range(8):
        publisher.publish(version, model_of(version, mesh()))
        actor(tmp_path).wait(exactly=version, deadline_s=30.0)
        publisher.close() if version == 7 else publisher._finish()
        kept.append(version_records.numbers(tmp_path / "weights"))
    assert kept == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 4], [3, 4, 5], [3, 4, 5, 6], [6, 7]]
    folders = sorted(path.name for path in (tmp_path / "weights").iterdir() if path.is_dir())
    assert folders == ["v_00000006", "v_00000007"]
    with pytest.raises(
        WeightError, match=r"version 5 is not kept any more in .*; there are \[6, 7\]"
    ):
        actor(tmp_path).wait(exactly=5, deadline_s=30.0)


def test_an_actor_that_was_away_reads_only_the_changes_since(tmp_path):
    publish(tmp_path, 0, keep=9, full_every=9)
    away = actor(tmp_path)
    away.wait(exactly=0, deadline_s=30.0)
    publish(tmp_path, 0, 1, 2, keep=9, full_every=9)
    assert_is(away.wait(at_least=2, deadline_s=30.0)[1], 2, mesh())
    lengths = {
        number: version_records.read_record(tmp_path / "weights", number) for number in (1, 2)
    }
    assert away.fetched.full_bytes == 0
    assert away.fetched.delta_bytes == sum(record.delta_bytes for record in lengths.values())


def test_weights_that_the_actor_lost_are_read_in_full(tmp_path):
    publish(tmp_path, 0, 1)
    careless = actor(tmp_path)
    _, model = careless.wait(exactly=0, deadline_s=30.0)
    for leaf in jax.tree.leaves(model):
        leaf.delete()
    assert_is(careless.wait(exactly=1, deadline_s=30.0)[1], 1, mesh())
    assert careless.fetched.full_bytes > 0


# --- A learner that starts again ------------------------------------------------------------------


def test_a_restarted_learner_may_publish_the_same_again_and_go_on(tmp_path):
    publish(tmp_path, 0, 1, 2)
    publish(tmp_path, 1, 2, 3, 4)
    assert kinds(tmp_path) == {3: "fulldelta", 4: "delta"}
    assert_is(actor(tmp_path).wait(exactly=4, deadline_s=30.0)[1], 4, mesh())
    publish(tmp_path, 2, 3, 4, 5)  # 2 is not there any more
    assert kinds(tmp_path) == {3: "fulldelta", 4: "delta", 5: "delta"}
    assert_is(actor(tmp_path).wait(exactly=5, deadline_s=30.0)[1], 5, mesh())


def test_a_learner_whose_replay_differs_is_stopped(tmp_path):
    publish(tmp_path, 0, 1)
    publisher = learner(tmp_path)
    publisher.publish(0, model_of(0, mesh()))
    checksum = version_records.read_record(tmp_path / "weights", 1).version.checksum
    with pytest.raises(
        WeightError,
        match=f"version 1 .* with checksum {checksum}, and now again with [0-9a-f]{{16}}",
    ):
        publisher.publish(1, model_of(2, mesh()))
    assert_is(actor(tmp_path).wait(exactly=1, deadline_s=30.0)[1], 1, mesh())


# --- Publications that fail -----------------------------------------------------------------------

FULL_AND_DELTA = 3  # the version after 2, see KEPT


def fail(*_, **__):
    raise OSError(28, "No space left on device")


def fail_at(real, when):
    return lambda *args, **named: fail() if when(*args) else real(*args, **named)


CRASHES = {
    "before anything is written": (codec, "write", lambda *_: True),
    "between full and delta": (codec, "write", lambda folder, kind, *_: kind == "delta"),
    "while the draft is synced": (files, "sync", lambda path: ".draft" in str(path)),
    "before the draft gets its name": (os, "replace", lambda source, _: ".draft" in str(source)),
    "before the record": (version_records, "write_json", lambda *_: True),
    "before the record gets its name": (os, "replace", lambda source, _: ".partial" in str(source)),
    "before older versions are deleted": (version_records, "prune", lambda *_: True),
    "while they are deleted": (shutil, "rmtree", lambda path, *_: path.name == "v_00000000"),
}


@pytest.mark.quick(first=4)
@pytest.mark.parametrize("moment", CRASHES)
def test_a_publication_that_breaks_off_leaves_only_complete_versions(moment, tmp_path):
    publisher = learner(tmp_path, keep=1)
    for version in range(FULL_AND_DELTA):
        publisher.publish(version, model_of(version, mesh()))
    publisher._finish()
    with pytest.MonkeyPatch.context() as patch:
        module, name, when = CRASHES[moment]
        patch.setattr(module, name, fail_at(getattr(module, name), when))
        publisher.publish(FULL_AND_DELTA, model_of(FULL_AND_DELTA, mesh()))
        with pytest.raises(
            WeightError,
            match=r"could not write version 3 to .* free\): .*(No space left|disk is full)",
        ):
            publisher.close()
    newest = actor(tmp_path).newest()
    assert newest == (FULL_AND_DELTA if "deleted" in moment else FULL_AND_DELTA - 1)
    for version in version_records.numbers(tmp_path / "weights"):
        assert_is(actor(tmp_path).wait(exactly=version, deadline_s=30.0)[1], version, mesh())
    publish(tmp_path, 2, 3, 4)
    assert kinds(tmp_path) == {3: "fulldelta", 4: "delta"}
    assert not [
        path for path in (tmp_path / "weights").iterdir() if path.suffix in (".draft", ".partial")
    ]
    assert_is(actor(tmp_path).wait(exactly=4, deadline_s=30.0)[1], 4, mesh())


def test_the_publication_after_a_failed_one_says_so_and_the_next_goes_on(tmp_path, monkeypatch):
    publisher = learner(tmp_path)
    publisher.publish(0, model_of(0, mesh()))
    publisher._finish()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "write", fail)
        publisher.publish(1, model_of(1, mesh()))
        with pytest.raises(WeightError, match="could not write version 1"):
            publisher.publish(2, model_of(2, mesh()))
    publisher.publish(2, model_of(2, mesh()))
    publisher.close()
    assert kinds(tmp_path) == {0: "full", 2: "full"}
    assert_is(actor(tmp_path).wait(exactly=2, deadline_s=30.0)[1], 2, mesh())


def test_a_learner_killed_at_any_moment_leaves_only_complete_versions(tmp_path):
    seed = random.randrange(1 << 32)
    print(f"{seed=}")
    process = Learner(tmp_path)
    try:
        assert process.answer() == "ready"
        for version in range(400):
            process.send(f"publish {version}")
        deadline = time.monotonic() + 60
        while len(found := version_records.numbers(tmp_path / "weights")) == 0 or found[-1] < 4:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(random.Random(seed).random() * 0.1)
    finally:
        process.kill()
    found = version_records.numbers(tmp_path / "weights")
    assert 4 <= found[-1] < 399
    for version in found:
        assert_is(actor(tmp_path).wait(exactly=version, deadline_s=30.0)[1], version, mesh())
    newest = found[-1]
    publish(tmp_path, newest - 1, newest, newest + 1)
    assert_is(actor(tmp_path).wait(exactly=newest + 1, deadline_s=30.0)[1], newest + 1, mesh())
    folder = tmp_path / "weights"
    assert {path.name for path in folder.glob("v_*") if path.is_dir()} == {
        version_records.data_folder(folder, number).name
        for number in version_records.numbers(folder)
    }


# Where no learner is running to publish a damaged version again; enough to read it.
NOBODY_S = 1.0

# --- Damage ---------------------------------------------------------------------------------------


def test_a_flipped_byte_in_any_file_is_noticed_and_never_used(tmp_path):
    publish(tmp_path, 0, 1)
    files = [*data_files(tmp_path, 0, "full"), *data_files(tmp_path, 1, "delta")]
    files.append(version_records.record_path(tmp_path / "weights", 1))
    for path in files:
        content = path.read_bytes()
        flip(path, len(content) // 2)
        try:
            model = actor(tmp_path).read(1, deadline_s=30.0)
        except WeightError as error:
            assert "version 1 cannot be read from" in str(error)
        else:
            assert_is(model, 1, mesh())  # a byte of a zarr.json that says nothing about the bits
            assert path.name == "zarr.json"
        path.write_bytes(content)
    assert_is(actor(tmp_path).wait(exactly=1, deadline_s=30.0)[1], 1, mesh())


def test_wrong_bits_behind_right_crcs_are_named_with_both_checksums(tmp_path):
    publish(tmp_path / "one", 0)
    publish(tmp_path / "other", 1)
    wrong = (
        version_records.data_folder(tmp_path / "other" / "weights", 1) / "full" / "final_norm.value"
    )
    right = (
        version_records.data_folder(tmp_path / "one" / "weights", 0) / "full" / "final_norm.value"
    )
    shutil.rmtree(right)
    shutil.copytree(wrong, right)
    checksum = version_records.read_record(tmp_path / "one" / "weights", 0).version.checksum
    with pytest.raises(
        WeightError,
        match=rf"version 0 from {tmp_path}/one/weights \(version 0 in full\) has checksum [0-9a-f]{{16}} instead of "
        f"{checksum}; different: final_norm",
    ):
        actor(tmp_path / "one").wait(exactly=0, deadline_s=NOBODY_S)


def test_a_damaged_change_is_gone_around_by_a_full_version(tmp_path, caplog):
    publish(tmp_path, 0, 1, 2, 3, 4, keep=9)
    follower = actor(tmp_path)
    follower.wait(exactly=2, deadline_s=30.0)
    for path in data_files(tmp_path, 3, "delta"):
        flip(path)
    # not by 3 and 4, but by 3 in full and 4
    assert_is(follower.wait(exactly=4, deadline_s=30.0)[1], 4, mesh())
    assert follower.fetched.full_bytes > 0
    assert (
        "read version 4 as version 3 in full + 4, because: the version held + 3 + 4: "
        in caplog.text
    )


def test_a_damaged_full_version_is_gone_around_by_an_older_one(tmp_path, caplog):
    publish(tmp_path, 0, 1, 2, 3, 4, keep=9)
    for path in data_files(tmp_path, 3, "full"):
        flip(path)
    assert_is(actor(tmp_path).wait(exactly=4, deadline_s=30.0)[1], 4, mesh())
    assert (
        "read version 4 as version 0 in full + 1 + 2 + 3 + 4, because: version 3 in full + 4: "
        in caplog.text
    )


def test_damage_that_no_way_leads_around_is_an_error_that_lists_the_ways(tmp_path):
    publish(tmp_path, 0, 1, 2, 3, 4, keep=9)
    for path in data_files(tmp_path, 4, "delta"):
        flip(path)
    with pytest.raises(
        WeightError,
        match=r"version 4 cannot be .*: version 3 in full \+ 4: .*; version 0 in full \+ 1",
    ):
        actor(tmp_path).wait(exactly=4, deadline_s=NOBODY_S)
    assert_is(actor(tmp_path).wait(exactly=3, deadline_s=30.0)[1], 3, mesh())


def test_changes_of_another_run_are_not_applied(tmp_path):
    publish(tmp_path, 0)
    follower = actor(tmp_path)
    follower.wait(exactly=0, deadline_s=30.0)
    shutil.rmtree(tmp_path / "weights")
    publisher = learner(tmp_path)
    publisher.publish(0, model_of(7, mesh()))
    publisher.publish(1, model_of(1, mesh()))
    publisher.close()
    assert_is(follower.wait(exactly=1, deadline_s=30.0)[1], 1, mesh())
    assert follower.fetched.full_bytes > 0


def test_weights_of_another_model_are_named(tmp_path):
    publish(tmp_path, 0)
    other = StoredSubscriber(tmp_path, sampling_model(CONFIG, "float32", mesh()), name="actor-1")
    with pytest.raises(
        WeightError,
        match=r"embed.table.value is bfloat16\[32, 16\] there and float32\[32, 16\] here",
    ):
        other.wait(exactly=0, deadline_s=30.0)


# --- Waiting --------------------------------------------------------------------------------------


def test_a_wait_that_is_too_long_says_who_waits_for_whom(tmp_path):
    folder = tmp_path / "weights"
    with pytest.raises(
        WeightTimeout,
        match=rf"^actor-1 waited 0.1 s for version 12 from the learner \(no version seen, in {folder}\)$",
    ):
        actor(tmp_path).wait(at_least=12, deadline_s=0.1)
    publish(tmp_path, 10)
    os.utime(version_records.record_path(folder, 10), times=(time.time() - 75,) * 2)
    message = rf"^actor-1 waited 0.1 s for version 12 from learner \(newest seen: 10, written 7[5-9] s ago, in {folder}\)$"
    with pytest.raises(WeightTimeout, match=message):
        actor(tmp_path).wait(at_least=12, deadline_s=0.1)


def test_a_version_deleted_while_it_is_read_gives_way_to_a_newer_one(tmp_path, monkeypatch):
    publish(tmp_path, 0, full_every=1, keep=1)
    real = codec.read

    def slow(*args):
        monkeypatch.setattr(codec, "read", real)
        publish(tmp_path, 1, full_every=1, keep=1)
        return real(*args)

    monkeypatch.setattr(codec, "read", slow)
    number, model = actor(tmp_path).wait(at_least=0, deadline_s=30.0)
    assert number == 1
    assert_is(model, 1, mesh())


def test_actors_that_came_first_wait_for_the_learner(tmp_path):
    early = actor(tmp_path)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(early.wait(at_least=1, deadline_s=30.0)[0])
    )
    thread.start()
    publish(tmp_path, 0, 1)
    thread.join(30.0)
    assert found == [1]


@pytest.mark.long
def test_storage_that_hangs_is_given_up(tmp_path, monkeypatch):
    publisher = learner(tmp_path, deadline_s=0.2)
    release = threading.Event()
    monkeypatch.setattr(codec, "write", lambda *_: release.wait(30.0))
    publisher.publish(0, model_of(0, mesh()))
    with pytest.raises(
        WeightError, match=r"could not write version 0 to .*: it took more than 0.2 s"
    ):
        publisher.close()
    release.set()
