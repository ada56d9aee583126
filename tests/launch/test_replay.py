"""launch.replay refuses flags that would have no effect."""

from __future__ import annotations

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import replay
from rl_code.config.read_config import ConfigError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(task="3"), "--task=3 says what is sampled again of a step; name it by --step"),
        (dict(sample="0"), "--sample=0 says what is sampled again of a step"),
        (dict(step="3", end="4"), "--end=4 bounds the training that is repeated without --step"),
        (dict(step="3", start="0"), "--start=0 bounds the training"),
    ],
)
def test_a_flag_of_the_other_kind_of_replay_is_refused(given, words):
    flags.FLAGS.mark_as_parsed()
    with flagsaver.as_parsed(**given), pytest.raises(ConfigError, match=words):
        replay.refuse_flags_of_the_other_way()


@pytest.mark.parametrize("given", [dict(), dict(end="4"), dict(step="3", task="2", sample="0")])
def test_flags_that_belong_together_are_accepted(given):
    flags.FLAGS.mark_as_parsed()
    with flagsaver.as_parsed(**given):
        assert replay.refuse_flags_of_the_other_way() is None
