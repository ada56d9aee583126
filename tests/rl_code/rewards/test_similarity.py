"""A change that resembles the reference's earns more than one that does not."""

from __future__ import annotations

import dataclasses
import difflib

import pytest

from rl_code.environment.finished import Grade
from rl_code.rewards import similarity as similarity_module
from rl_code.rewards.similarity import similarity
from tests.rl_code.rewards.test_rewards import TASK, finished

FILES = {
    "cause.py": "def cause(x):\n    x = x * 3\n    return x + 7\n",
    "other.py": "from cause import cause\n\n\ndef other(x):\n    return cause(x) + 7\n",
}
REFERENCE = {"cause.py": "def cause(x):\n    x = x * 4\n    return x + 7\n"}
FAILED = Grade(True, (False,), (False,))


def paid(grade: Grade = FAILED, reference: dict = REFERENCE, **changed: str) -> float:
    files = {f"{name}.py": text for name, text in changed.items()}
    episode = dataclasses.replace(
        finished(grade),
        task=dataclasses.replace(TASK, reference=reference),
        files_before=FILES,
        files_after=FILES | files,
    )
    return similarity(episode)


def test_nearer_changes_earn_more():
    exact = paid(cause=REFERENCE["cause.py"])
    constant = paid(cause=REFERENCE["cause.py"].replace("4", "5"))
    operator = paid(cause=REFERENCE["cause.py"].replace("* 4", "- 5"))
    line = paid(cause=FILES["cause.py"].replace("7", "9"))
    file = paid(other=FILES["other.py"].replace("7", "9"))
    both = paid(cause=REFERENCE["cause.py"], other=FILES["other.py"].replace("7", "9"))
    assert exact == 1.0 > constant > operator > line > file > 0.0
    assert exact > both > file


def test_what_is_no_honest_work_earns_nothing():
    right = REFERENCE["cause.py"]
    assert paid(Grade(True, (True,), (True,)), cause=right) == 1.0
    assert paid(Grade(False), cause=right) == 0.0
    assert paid(Grade(True, (True,), (True,), ("forged_result",)), cause=right) == 0.0
    assert paid() == paid(cause=right, reference={}) == 0.0


@pytest.mark.parametrize(
    "text",
    ["".join(f"{i % 90}\n" for i in range(4000)), "x = 1\n" * 900_000],
    ids=["few lines, repeated", "long"],
)
def test_the_difference_is_made_elsewhere_and_within_a_time(text, monkeypatch):
    monkeypatch.setattr(
        difflib, "unified_diff", lambda *_, **__: pytest.fail("made in this process")
    )
    monkeypatch.setattr(similarity_module, "_CPU_S", 0.2)
    assert paid(cause=text) == 0.0
    assert paid(cause=REFERENCE["cause.py"]) == 1.0


@pytest.mark.parametrize("text", ["x = 1\n" * 50_000, "(" * 50_000, "\0\ud800" * 100])
def test_whatever_is_written_takes_a_bounded_time(text):
    assert 0.0 <= paid(cause=text) < 0.5
