"""Properties of weights that go from device to device between processes, with storage behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_code.weights import transfer_subscriber
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.transfer_publisher import TransferPublisher
from rl_code.weights.transfer_subscriber import TransferSubscriber
from rl_code.weights.version_records import read_json, write_json
from rl_code.weights.versions import WeightTimeout
from tests.rl_code.weights.learner import LONG_S, Learner
from tests.rl_code.weights.small import DTYPE, KEPT, assert_is, mesh, model_of, wanted

HOST = "127.0.0.1"


def actor(
    workdir: Path, where=None, *, pull_s: float = LONG_S, name: str = "actor-1"
) -> TransferSubscriber:
    return TransferSubscriber(
        StoredSubscriber(workdir, wanted(where or mesh()), name=name), host=HOST, pull_s=pull_s
    )


def offer_path(workdir: Path) -> Path:
    return workdir / "weights" / "live" / "publisher_0.json"


@pytest.fixture(scope="module")
def serving(tmp_path_factory) -> Iterator[tuple[Path, Learner]]:
    """A workdir and the learner, in another process and on two devices, that serves from it."""
    workdir = tmp_path_factory.mktemp("serving")
    learner = Learner(workdir)
    try:
        assert learner.answer() == "ready"
        yield workdir, learner
    finally:
        learner.kill()


def test_actors_of_any_layout_pull_what_another_process_serves(serving):
    workdir, learner = serving
    layouts = [mesh(), mesh(2, 4), mesh(1, 2, fsdp=4)]
    actors = [actor(workdir, where, name=f"actor-{index}") for index, where in enumerate(layouts)]
    for version in (0, 1):
        assert learner.ask(f"serve {version}") == "served"
        found = {}

        def act(index: int, version: int = version, found: dict = found) -> None:
            found[index] = actors[index].wait(at_least=version, deadline_s=LONG_S)

        threads = [threading.Thread(target=act, args=(index,)) for index in range(len(actors))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        for index, where in enumerate(layouts):
            number, model = found[index]
            assert number == version
            assert_is(model, version, where)
            assert actors[index].fetched.live_bytes > 0 and actors[index].fetched.full_bytes == 0
    live = workdir / "weights" / "live"
    assert {path.name for path in live.iterdir()} == {"publisher_0.json"}


def test_what_was_pulled_is_the_base_of_the_next_change(serving):
    workdir, learner = serving
    assert learner.ask("serve 2") == "served"
    follower = actor(workdir)
    assert_is(follower.wait(exactly=2, deadline_s=LONG_S)[1], 2, mesh())
    assert follower.fetched.live_bytes > 0
    assert learner.ask("serve 4") == "served"
    assert learner.ask("serve 5") == "served"
    assert_is(
        follower.wait(exactly=4, deadline_s=LONG_S)[1], 4, mesh()
    )  # only the newest is served
    assert (
        follower.fetched.live_bytes == follower.fetched.full_bytes == 0
        and follower.fetched.delta_bytes > 0
    )


def test_wrong_bits_are_not_used(serving, monkeypatch, caplog):
    workdir, learner = serving
    assert learner.ask("serve 6") == "served"
    real = transfer_subscriber.join
    monkeypatch.setattr(transfer_subscriber, "join", lambda box, pieces: real(box, pieces) * 2)
    doubtful = actor(workdir)
    assert_is(doubtful.wait(exactly=6, deadline_s=LONG_S)[1], 6, mesh())
    assert doubtful.fetched.live_bytes == 0 and doubtful.fetched.full_bytes > 0
    assert (
        "actor-1 pulling version 6 failed: version 6 from the learner's devices has checksum"
        in caplog.text
    )


def test_a_request_that_cannot_be_served_is_answered(serving, caplog):
    workdir, learner = serving
    assert learner.ask("serve 7") == "served"
    offer = read_json(offer_path(workdir))
    late = actor(workdir)
    # as seen a moment before 7
    late._offers = lambda: [offer | {"version": offer["version"] | {"number": 6}}]
    assert_is(late.wait(exactly=6, deadline_s=LONG_S)[1], 6, mesh())
    assert "pulling version 6 failed: process 0 of learner at " in caplog.text
    assert "refused: serves version 7 now; trying storage" in caplog.text


def once_armed(follower: TransferSubscriber, action) -> None:
    """Does something when the arrays are ready to be pulled, and before they are."""
    real = follower._await_answer

    def answered(*args) -> int:
        uuid = real(*args)
        assert uuid > 1 << 32, "a ticket that can be guessed"
        action()
        return uuid

    follower._await_answer = answered


def test_a_learner_that_hangs_in_the_middle_is_waited_for_only_so_long(serving, caplog):
    workdir, learner = serving
    assert learner.ask("serve 8") == "served"
    StoredSubscriber(workdir, wanted(mesh()), name="").wait(exactly=8, deadline_s=LONG_S)
    follower = actor(workdir, pull_s=2.0)
    once_armed(follower, learner.stop)
    try:
        assert_is(follower.wait(exactly=8, deadline_s=LONG_S)[1], 8, mesh())
        assert follower.fetched.live_bytes == 0
        assert (
            "pulling version 8 failed: the arrays did not arrive within 2 s; trying storage"
            in caplog.text
        )
    finally:
        learner.process.send_signal(signal.SIGCONT)
    assert learner.ask("serve 9") == "served"
    patient = actor(workdir)
    assert_is(patient.wait(exactly=9, deadline_s=LONG_S)[1], 9, mesh())
    assert patient.fetched.live_bytes > 0


def test_a_learner_that_dies_in_the_middle_leaves_the_actor_to_storage(tmp_path, caplog):
    learner = Learner(tmp_path)
    try:
        assert learner.answer() == "ready"
        assert learner.ask("serve 0") == "served"
        assert learner.ask("serve 1") == "served"  # so that 0 is stored
        StoredSubscriber(tmp_path, wanted(mesh()), name="").wait(exactly=1, deadline_s=LONG_S)
        follower = actor(tmp_path, pull_s=3.0)
        once_armed(follower, lambda: (learner.process.kill(), learner.process.wait(30)))
        assert_is(follower.wait(at_least=1, deadline_s=LONG_S)[1], 1, mesh())
        assert follower.fetched.live_bytes == 0 and follower.fetched.full_bytes > 0
        assert "actor-1 pulling version 1 failed: " in caplog.text
        # nobody answers at the old address; this actor knows, another one finds out
        assert follower.newest() == 1
        begin = time.monotonic()
        with pytest.raises(
            WeightTimeout,
            match=r"actor-1 waited 0\.1 s for version 2 from learner \(newest seen: 1, ",
        ):
            follower.wait(at_least=2, deadline_s=0.1)
        assert_is(follower.wait(at_least=1, deadline_s=LONG_S)[1], 1, mesh())
        assert time.monotonic() - begin < LONG_S
        other = actor(tmp_path, pull_s=0.3, name="actor-2")
        assert_is(other.wait(at_least=1, deadline_s=LONG_S)[1], 1, mesh())
        assert "actor-2 pulling version 1 failed: process 0 of learner at 127.0.0.1:" in caplog.text
        assert "did not answer within 0.3 s; trying storage" in caplog.text
    finally:
        learner.kill()


def test_an_offer_whose_version_never_was_stored_is_waited_for_only_so_long(tmp_path, caplog):
    publisher = StoredPublisher(tmp_path, DTYPE, KEPT)
    publisher.publish(0, model_of(0, mesh()))
    publisher.close()
    live = TransferPublisher(StoredPublisher(tmp_path, DTYPE, KEPT), host=HOST)
    live.publish(0, model_of(0, mesh()))
    offer = read_json(offer_path(tmp_path))
    live.close()
    assert not offer_path(tmp_path).exists()
    # and then it died
    write_json(offer_path(tmp_path), offer | {"version": offer["version"] | {"number": 3}})
    follower = actor(tmp_path, pull_s=0.2)
    assert follower.newest() == 3
    with pytest.raises(WeightTimeout, match=r"for version 2 from learner \(newest seen: 0, "):
        follower.wait(at_least=2, deadline_s=0.5)
    assert follower.newest() == 0
    assert_is(follower.wait(at_least=0, deadline_s=LONG_S)[1], 0, mesh())


def test_a_restarted_learner_clears_the_folder_and_serves_again(tmp_path):
    first = TransferPublisher(StoredPublisher(tmp_path, DTYPE, KEPT), host=HOST)
    first.publish(0, model_of(0, mesh()))
    follower = actor(tmp_path)
    follower.wait(at_least=0, deadline_s=LONG_S)
    first._stored._finish()  # nothing of it is written any more
    first._closing.set()  # as if it had been killed
    first._thread.join()
    (offer_path(tmp_path).parent / "request_0_old").write_text("{}")
    second = TransferPublisher(StoredPublisher(tmp_path, DTYPE, KEPT), host=HOST)
    assert os.listdir(offer_path(tmp_path).parent) == []
    second.publish(0, model_of(0, mesh(1, 2)))
    second.publish(1, model_of(1, mesh(1, 2)))
    assert_is(follower.wait(at_least=1, deadline_s=LONG_S)[1], 1, mesh())
    assert follower.fetched.live_bytes > 0
    second.close()
    assert second.published.version == 1


def test_a_malformed_request_does_not_stop_the_server(tmp_path):
    live = TransferPublisher(StoredPublisher(tmp_path, DTYPE, KEPT), host=HOST)
    live.publish(0, model_of(0, mesh()))
    folder = offer_path(tmp_path).parent
    (folder / "request_0_a").write_text("no json")
    write_json(
        folder / "request_0_b",
        {"session": live._session, "version": 0, "wants": [["nothing", [[0, 1]]]]},
    )
    write_json(folder / "request_0_c", ["a list"])
    answers = [folder / f"answer_0_{name}" for name in "abc"]
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in answers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all("refused" in read_json(path) for path in answers)
    assert_is(actor(tmp_path).wait(at_least=0, deadline_s=LONG_S)[1], 0, mesh())
    live.close()


def test_a_pull_needs_a_deadline(tmp_path):
    with pytest.raises(ValueError, match=r"pull_s=0\.0 must be positive"):
        actor(tmp_path, pull_s=0.0)
