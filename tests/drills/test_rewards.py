"""Rewards from outside of the tree, as docs/adding.md adds them."""

from __future__ import annotations

import pytest

from rl_code.config.read_config import ConfigError
from tests.drills.episodes import SUBMIT, TASK, configured, player, write

SHORT = "def f(x):\n    return 2 * x\n"
LONG = "".join(f"a{i} = {i}\n" for i in range(20)) + SHORT
WRONG = "def f(x):\n    return 3 * x\n"
TEST = "<|call|>test<|end|>"


def test_a_reward_from_outside_reads_the_diff(outside):
    outside("A reward that reads the diff")
    diff = dict(name="my_lab.diffs:LongDiff", allowed=4, weight=0.05, cap=(-0.1, 0.0))
    with player(configured(reward=dict(signals=("tests", "integrity", diff)))) as play:
        found = [play(TASK, write(text) + SUBMIT).reward for text in (SHORT, LONG, WRONG)]
    assert [reward.components["LongDiff"] for reward in found] == [0.0, -0.1, 0.0]
    assert [reward.total for reward in found] == [1.0, 0.9, 0.0]


def test_a_reward_from_outside_reads_tool_calls(outside):
    outside("A reward that reads tool calls")
    habit = dict(name="my_lab.habits:tested_last_edit", weight=0.25, label="habit")
    with player(configured(reward=dict(signals=("tests", habit)))) as play:
        tested = play(TASK, write(SHORT) + TEST, SUBMIT).reward
        untested = play(TASK, write(WRONG) + TEST, write(SHORT) + SUBMIT).reward
        untouched = play(TASK, TEST + SUBMIT).reward
    assert (tested.total, tested.components["habit"]) == (1.25, 0.25)
    assert (untested.total, untouched.total) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("signal", "message"),
    [
        ("my_lab.diffs:LongDif", r"reward\.signals\[0\].*my_lab\.diffs has no 'LongDif'"),
        (dict(name="my_lab.diffs:LongDiff", allow=3), "Did you mean 'allowed'"),
        (dict(name="my_lab.diffs:LongDiff", weight=-1.0), "must be at least 0"),
    ],
)
def test_a_wrong_reward_is_named_when_the_config_is_built(outside, signal, message):
    outside("A reward that reads the diff")
    with pytest.raises(ConfigError, match=message):
        configured(reward=dict(signals=(signal,)))
