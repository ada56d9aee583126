"""The section of a config for what people did."""

from __future__ import annotations

import pytest

from people.feedback.config import FeedbackConfig
from people.feedback.rewards.combine import make_reward
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError


def test_a_section_is_read_with_all_inside_it():
    section = {
        "keep_days": 7,
        "reward": {"signals": ("tab", {"name": "latency", "cap": (-0.1, 0.0)})},
        "poisoning": {"user_share": 0.2},
    }
    config = read_config.build(FeedbackConfig, section)
    assert config.url("runs/a") == "sqlite:///runs/a/people.db"
    assert len(make_reward(config.reward).signals) == 2
    # as a run keeps it
    assert read_config.build(FeedbackConfig, read_config.to_dict(config)) == config


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"keep_days": 0.0}, "keep_days"),
        ({"silence_s": -1.0}, "silence_s"),
        ({"poisoning": {"user_share": 0.0}}, "user_share"),
        ({"poisoning": {"least": 1}}, "least"),
        ({"retention": 3}, "no such key"),
    ],
)
def test_a_wrong_section_is_refused(section, says):
    with pytest.raises(ConfigError, match=says):
        read_config.build(FeedbackConfig, section)
