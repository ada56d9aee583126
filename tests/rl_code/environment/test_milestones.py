"""Milestones of an episode: the share of visible tests that pass, message by message."""

from __future__ import annotations

import contextlib

import pytest

from rl_code.environment.asked import Asked
from rl_code.environment.episode import Episode
from rl_code.environment.finished import Grade
from rl_code.environment.milestones import Milestones, MilestonesConfig, groups_of, share
from rl_code.store import serialization
from rl_code.types import Case, Suite, Tests
from tests.rl_code.environment import scripted

GOOD = "<|call|>write\ndef f(x):\n    return [2 * y for y in x]\n<|end|>"
BAD = "<|call|>write\ndef f(x):\n    return x\n<|end|>"
BROKEN = "<|call|>write\ndef f(x):\n    return 1 / 0\n<|end|>"
TEST, SUBMIT = "<|call|>test<|end|>", "<|call|>submit<|end|>"


@pytest.fixture
def start(task, pool, limits, tokenizer):
    def start(index: int = 0) -> Episode:
        asked = Asked(milestones=MilestonesConfig())
        return scripted.begin(task, pool, tokenizer, limits, index=index, asked=asked)

    return start


@pytest.fixture
def say(tokenizer):
    def say(episode: Episode, *messages: str) -> None:
        scripted.say(episode, tokenizer, *(f"{message}<|eot|>" for message in messages))

    return say


def finish(episode: Episode):
    with contextlib.closing(episode):
        return episode.finish()


def test_each_message_has_the_share_of_visible_tests_that_then_pass(start, say, pool):
    episode = start()
    say(episode, BROKEN, BAD + TEST, GOOD, SUBMIT)
    trajectory = finish(episode)
    # The file at the start passes one of two visible tests, as does BAD.
    assert trajectory.milestones == (0.5, 0.0, 0.5, 1.0, 1.0)
    assert trajectory.solved
    # The work, the state at the start (which is BAD), BROKEN, and the first edit alone.
    assert len(pool.graded) == 4


def test_messages_that_change_nothing_keep_the_share(start, say, pool):
    episode = start()
    say(episode, TEST, SUBMIT)
    assert finish(episode).milestones == (0.5, 0.5, 0.5)
    assert len(pool.graded) == 1  # what is handed in is what was there


def test_work_that_was_not_handed_in_has_milestones_too(start, say):
    episode = start()
    say(episode, GOOD, BAD, TEST, TEST)
    trajectory = finish(episode)
    assert trajectory.status == "turn_limit"
    assert trajectory.milestones == (0.5, 1.0, 0.5, 0.5, 0.5)


def test_a_fork_has_the_milestones_of_its_own_way(start, say):
    one = start()
    say(one, GOOD)
    other = one.fork(1)
    say(one, SUBMIT)
    say(other, BROKEN, SUBMIT)
    assert finish(one).milestones == (0.5, 1.0, 1.0)
    assert finish(other).milestones == (0.5, 1.0, 0.0, 0.0)


def test_a_fault_has_none(start, say, pool):
    episode = start()
    say(episode, GOOD, SUBMIT)
    pool.faulty = True
    trajectory = finish(episode)
    assert trajectory.status == "fault" and trajectory.milestones is None


def test_without_time_the_share_is_that_of_the_message_before(task, pool, limits, monkeypatch):
    measured = Milestones(task, MilestonesConfig(), dict(task.files))
    measured.note({"solution.py": "def f(x):\n    return [2 * y for y in x]\n"})
    final = {"solution.py": ""}
    measured.note(final)
    clock = iter([0.0, 0.0, 1e9, 1e9])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    monkeypatch.setattr(measured, "_grade", lambda *_: 0.5)
    verdict = Grade(True, (False, False), ())
    assert measured.potentials(final, verdict, pool, limits) == (0.5, 0.5, 0.0)


def test_a_proven_cheat_reaches_no_milestone(task, pool, limits):
    measured = Milestones(task, MilestonesConfig(), {})
    cheat = Grade(True, (True, True), (True,), flags=("forged_result",))
    assert measured.potentials({}, cheat, pool, limits) == (0.0,)


def test_milestones_are_tests_or_places():
    suite = Suite({}, ("a.py::x", "b.py::y"), ("a.py::z",))
    cases = (Case((), 1), Case((), 2, target="m.py:g"), Case((), 3))
    tests = Tests(cases, ("assert f()",), suite)
    assert groups_of(tests, "test") == [[at] for at in range(7)]
    assert groups_of(tests, "place") == [[0, 2, 3], [1], [4, 6], [5]]
    passed = [True, True, True, False, True, True, False]
    assert share(groups_of(tests, "place"), passed) == 2 / 4
    assert share([], []) == 0.0
    with pytest.raises(ValueError, match="by='file' must be 'test' or 'place'"):
        MilestonesConfig(by="file")


def test_records_without_milestones_do_not_name_them(task, pool, tokenizer, limits):
    trajectory = scripted.play(task, pool, tokenizer, limits, SUBMIT + "<|eot|>")
    assert trajectory.milestones is None
    assert b"milestones" not in serialization.dumps(trajectory)
