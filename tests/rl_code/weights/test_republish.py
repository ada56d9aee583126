"""Properties of versions that cannot be read: published again in full, with the bits they had."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
from pathlib import Path

import jax
import pytest

from rl_code.weights import codec, republish, stored_publisher, version_records
from rl_code.weights.local import LocalWeights
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.versions import WeightError, WeightsConfig
from rl_code.weights.waiting import Deadline
from tests.rl_code.weights.small import DTYPE, assert_is, mesh, model_of, wanted

LONG_S = 30.0


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a learner that has published some versions; the first is the only full one."""
    monkeypatch.setattr(stored_publisher, "_POLL_S", 0.02)
    started = []

    def start(*versions: int, keep: int = 9) -> StoredPublisher:
        config = WeightsConfig(full_every=100, keep=keep, deadline_s=LONG_S)
        publisher = StoredPublisher(tmp_path, DTYPE, config)
        started.append(publisher)
        for version in versions:
            publisher.publish(version, model_of(version, mesh()))
        publisher._finish()
        return publisher

    yield start
    for publisher in started:
        publisher.close()


def read(workdir: Path, version: int, deadline_s: float = LONG_S) -> None:
    """A new actor reads a version, and has the bits of it."""
    reader = StoredSubscriber(workdir, wanted(mesh()), name="actor-1")
    number, model = reader.wait(exactly=version, deadline_s=deadline_s)
    assert number == version
    assert_is(model, version, mesh())


def damage(workdir: Path, number: int, kind: str) -> None:
    """Flips one bit in the middle of one file of a version."""
    folder = workdir / "weights"
    if kind == "record":
        path = version_records.record_path(folder, number)
    else:
        found = (version_records.data_folder(folder, number) / kind).rglob("c*")
        path = max(filter(Path.is_file, found), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def is_full(workdir: Path, number: int) -> bool:
    record = version_records.readable_record(workdir / "weights", number)
    return record is not None and record.full_bytes > 0


@pytest.mark.quick(first=3)
@pytest.mark.parametrize(
    ("number", "kind", "asked"),
    [
        (4, "delta", 4),  # the newest, which the learner has in memory
        (2, "delta", 2),  # an older one: back from the newest by the changes
        (2, "delta", 3),
        (0, "full", 0),  # the only full version, on which all others stand
        (0, "full", 4),
        (4, "record", 4),
        (2, "record", 4),
    ],
)
def test_a_flipped_bit_under_a_running_pair_does_not_end_it(start, tmp_path, number, kind, asked):
    publisher = start(0, 1, 2, 3, 4)
    damage(tmp_path, number, kind)
    read(tmp_path, asked)
    folder = tmp_path / "weights"
    assert is_full(tmp_path, asked)
    assert not list((folder / republish.UNREADABLE).iterdir())
    publisher.publish(5, model_of(5, mesh()))
    publisher._finish()
    for version in (asked, 5):
        read(tmp_path, version)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_versions_before_one_that_was_published_again_can_be_too(start, tmp_path):
    start(0, 1, 2, 3, 4)
    damage(tmp_path, 0, "full")
    for version in (4, 3, 1, 0, 2):
        read(tmp_path, version)


def test_a_request_is_answered_while_newer_versions_are_published(start, tmp_path):
    publisher = start(0, 1, 2, keep=30)
    for version in range(3, 12, 4):
        damage(tmp_path, version - 1, "full" if is_full(tmp_path, version - 1) else "delta")
        # Whoever takes any version gets a newer one, which is a change of the damaged one.
        reader = StoredSubscriber(tmp_path, wanted(mesh()), name="actor-1")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(reader.wait, at_least=version - 1, deadline_s=LONG_S)
            for number in range(version, version + 4):
                publisher.publish(number, model_of(number, mesh()))
            found, model = reading.result(LONG_S)
        assert found >= version - 1
        assert_is(model, found, mesh())
        publisher._finish()
        read(tmp_path, version + 3)


def test_the_learner_publishes_while_it_waits_for_nothing_else(start, tmp_path, caplog):
    start(0, 1)
    damage(tmp_path, 1, "delta")
    follower = StoredSubscriber(tmp_path, wanted(mesh()), name="actor-7")
    follower.wait(exactly=0, deadline_s=LONG_S)
    with caplog.at_level(logging.WARNING):
        assert_is(follower.wait(at_least=1, deadline_s=LONG_S)[1], 1, mesh())
    assert "actor-7 asks the learner for it" in caplog.text
    assert "learner published version 1 again in full, because actor-7 could not" in caplog.text


def test_an_actor_in_the_learners_process_goes_on_too(start, tmp_path):
    subscriber = StoredSubscriber(tmp_path, wanted(mesh()), name="actor")
    both = LocalWeights(wanted(mesh()), keep=1, stored=(start(), subscriber))
    for version in range(3):
        both.publish(version, model_of(version, mesh()))
    both._publisher._finish()
    damage(tmp_path, 1, "delta")
    assert_is(both.wait(exactly=1, deadline_s=LONG_S)[1], 1, mesh())


@pytest.mark.quick(first=2)
@pytest.mark.parametrize(
    ("number", "kind"), [(1, "delta"), (2, "delta"), (3, "delta"), (0, "full"), (2, "record")]
)
def test_a_learner_that_makes_damaged_versions_again_mends_them(start, tmp_path, number, kind):
    start(0, 1, 2, 3).close()
    damage(tmp_path, number, kind)
    again = start(2, 3, 4)  # from its checkpoint of step 2 on
    again.close()
    for version in (2, 3, 4):
        read(tmp_path, version, deadline_s=5.0)  # nobody would answer a request


def test_a_request_from_before_the_learner_started_is_answered(start, tmp_path):
    start(0, 1, 2).close()
    damage(tmp_path, 2, "delta")
    with pytest.raises(WeightError, match=r"version 2 cannot be .* did not publish it again"):
        read(tmp_path, 2, deadline_s=0.1)
    start(1)  # a request for a version that it has yet to make waits
    with pytest.raises(WeightError, match=r"did not publish it again within 0\.3 s"):
        read(tmp_path, 2, deadline_s=0.3)
    start(2)
    read(tmp_path, 2)


def test_a_version_that_nobody_can_make_again_is_refused_until_the_learner_does(start, tmp_path):
    first = start(0, 1, 2, 3, 4)
    for number in (2, 3):  # from neither side can version 2 be made
        damage(tmp_path, number, "delta")
    with pytest.raises(
        WeightError,
        match=r"version 2 cannot be read .* version 0 in full \+ 1 \+ 2.*; the learner was asked "
        "for it and could not publish it again",
    ):
        read(tmp_path, 2)
    for version in (1, 3, 4):
        read(tmp_path, version)
    first.close()
    start(2, 3)
    for version in range(1, 5):
        read(tmp_path, version)


def test_wrong_bits_of_a_learner_are_never_used(start, tmp_path):
    publisher = start(0, 1, 2)
    version, host = publisher._previous
    wrong = {
        name: dataclasses.replace(x, parts={box: part ^ 1 for box, part in x.parts.items()})
        for name, x in host.items()
    }
    publisher._previous = version, wrong
    damage(tmp_path, 2, "delta")
    with pytest.raises(WeightError, match=r"has checksum [0-9a-f]{16} instead of .*; the learner"):
        read(tmp_path, 2)
    publisher._previous = version, host
    read(tmp_path, 2)


def ask_at_once(folder: Path, number: int, askers: int = 4) -> list[dict[str, str]]:
    """Several ask for a version at the same moment; the request that each finds afterwards."""
    ready = threading.Barrier(askers)

    def ask(asker: int) -> dict[str, str]:
        ready.wait(LONG_S)
        who, why = f"actor-{asker}", "its checksum is wrong"
        assert not republish.ask(folder, number, who, why, Deadline(0.0))
        return republish.pending(folder)[number][1]

    with concurrent.futures.ThreadPoolExecutor(askers) as pool:
        return list(pool.map(ask, range(askers)))


def test_several_that_ask_at_once_make_one_request(tmp_path):
    for number in range(50):
        found = ask_at_once(tmp_path, number)
        assert found == [found[0]] * len(found)
        assert found[0].keys() == {"id", "who", "why"}
        name = version_records.record_path(tmp_path, number).name
        names = [path.name for path in (tmp_path / republish.UNREADABLE).iterdir()]
        assert [there for there in names if name in there] == [name]


def test_a_failed_answer_does_not_stand_in_the_way_of_a_later_request(start, tmp_path, monkeypatch):
    start(0, 1, 2)
    damage(tmp_path, 2, "delta")

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(codec, "write", fail)
        with pytest.raises(WeightError, match="could not publish it again"):
            read(tmp_path, 2)
    read(tmp_path, 2)
    assert not list((tmp_path / "weights" / republish.UNREADABLE).iterdir())


def test_a_damaged_request_is_deleted_and_leaves_room_for_another(start, tmp_path):
    start(0, 1)
    folder = tmp_path / "weights" / republish.UNREADABLE
    folder.mkdir()
    (folder / "v_00000001.json").write_bytes(b'{"id"')
    assert Deadline(LONG_S).wait(lambda: not list(folder.iterdir()))
    damage(tmp_path, 1, "delta")
    read(tmp_path, 1)


def test_a_process_that_cannot_make_its_parts_does_not_let_the_others_wait(
    start, tmp_path, monkeypatch
):
    publisher = start(0, 1)
    damage(tmp_path, 1, "delta")
    folder = tmp_path / "weights"
    asked = {"id": "abc", "who": "actor-1", "why": "its checksum is wrong"}
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: 1)
        publisher._answer(0, folder / "request", asked, publisher._previous)
    with pytest.raises(WeightError, match="another process of the learner cannot make its parts"):
        publisher._await_others(folder / ".v_00000000.abc", 0, Deadline(LONG_S))
