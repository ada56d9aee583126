"""Properties of a learner and an actor that consist of several processes, and of waits for each
other.
"""

from __future__ import annotations

import threading

import jax
import pytest

from rl_code.weights import version_records
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.versions import WeightError, WeightsConfig, WeightTimeout
from rl_code.weights.waiting import Deadline, agree, within
from tests.programs import free_port
from tests.rl_code.weights.learner import LONG_S, Learner
from tests.rl_code.weights.small import DTYPE, KEPT, assert_is, mesh, model_of, wanted


def ask(learners: list[Learner], *lines: str) -> list[str]:
    """Sends all processes a line, the same unless several are given, and returns their answers."""
    for index, learner in enumerate(learners):
        learner.send(lines[index % len(lines)])
    return [learner.answer() for learner in learners]


@pytest.mark.long
def test_two_processes_publish_and_read_one_model(tmp_path):
    port = free_port()
    learners = [Learner(tmp_path, port, index, 2) for index in range(2)]
    folder = tmp_path / "weights"
    try:
        assert [learner.answer() for learner in learners] == ["ready"] * 2
        for version in (0, 1):
            assert ask(learners, f"serve {version}") == ["served"] * 2
        # each reads what both wrote, in full and by its change, and pulls from both what both hold
        assert ask(learners, "fetch 0 stored") == ["True False False"] * 2
        assert ask(learners, "fetch 1 stored") == ["False True False"] * 2
        assert ask(learners, "fetch 1 live") == ["False False True"] * 2

        # a third program reads it, and a learner of another shape finds the same checksums
        for version in (0, 1):
            alone = StoredSubscriber(tmp_path, wanted(mesh()), name="actor-2")
            assert_is(alone.wait(exactly=version, deadline_s=LONG_S)[1], version, mesh())
        again = StoredPublisher(tmp_path, DTYPE, KEPT)
        again.publish(1, model_of(1, mesh(1, 2)))
        again.close()

        # a change that is damaged is published again by both, in full
        assert ask(learners, "serve 2") == ["served"] * 2
        delta = version_records.data_folder(folder, 2) / "delta"
        assert Deadline(LONG_S).wait(version_records.record_path(folder, 2).exists)
        parts = [path for path in delta.rglob("c*") if path.is_file()]
        assert parts
        for path in parts:
            path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
        assert ask(learners, "fetch 2 stored") == ["True False False"] * 2

        # what one of them cannot read none of them uses, also when it was published again
        assert ask(learners, "serve 3") == ["served"] * 2
        assert ask(learners, "cut 0", "cut 1")[1] == "cut"
        answers = ask(learners, "fetch 3 stored")
        assert all("version 3 cannot be read from" in answer for answer in answers)
        assert "another process could not read it" in answers[0] and "unplugged" in answers[1]

        # all stop when one publishes other bits under a known number, or another number
        answers = ask(learners, "publish 3 4")
        assert (
            "and now again with" in answers[0]
            and "process 0 could not publish version 3" in answers[1]
        )
        answers = ask(learners, "publish 5", "publish 6")
        assert all(
            "the learner's processes publish different versions: [5, 6]" in answer
            for answer in answers
        )
        assert version_records.numbers(folder) == [2, 3]
    finally:
        for learner in learners:
            learner.kill()


def test_a_process_that_does_not_write_its_parts_is_named(tmp_path, monkeypatch):
    # as long as it takes to write; only the wait for the other process is short
    publisher = StoredPublisher(
        tmp_path, DTYPE, WeightsConfig(full_every=1, keep=1, deadline_s=LONG_S)
    )
    real = publisher._await_others

    def with_another(draft, number, _) -> None:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        real(draft, number, Deadline(0.3))

    monkeypatch.setattr(publisher, "_await_others", with_another)
    publisher.publish(0, model_of(0, mesh()))
    with pytest.raises(
        WeightError,
        match=r"process 0 of learner waited 0.3 s for processes \[1\] to write their parts of version 0",
    ):
        publisher._pending[1].result(LONG_S)
    monkeypatch.undo()
    assert version_records.numbers(tmp_path / "weights") == []


@pytest.fixture
def never():
    """An event that is set when the test is over, so that no thread stays behind."""
    event = threading.Event()
    yield event
    event.set()


def test_a_wait_for_something_that_never_returns_ends(never):
    with pytest.raises(WeightTimeout, match=r"^the actor waited 0\.1 s$"):
        within(0.1, never.wait, "the actor")
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0, "the actor")
    assert within(5.0, lambda: 3, "the actor") == 3


def test_a_process_that_waits_for_others_in_vain_says_so(monkeypatch, never):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.process_allgather", lambda _: never.wait()
    )
    with pytest.raises(
        WeightTimeout,
        match=r"^process 0 of 2, which reads version 3, for the others waited 0\.1 s$",
    ):
        agree(0.1, "which reads version 3", 1)


def test_one_process_agrees_with_itself():
    assert agree(1.0, "", 3, True) == [(3, True)]


def test_a_deadline_counts_down():
    deadline = Deadline(0.1)
    assert 0 < deadline.left() <= 0.1
    assert not deadline.wait(lambda: False, poll_s=0.01) and deadline.left() == 0
    assert deadline.wait(lambda: True)
