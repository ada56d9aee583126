"""A protocol from outside of the tree, as docs/adding.md adds it."""

from __future__ import annotations

import pytest

from rl_code.config.read_config import ConfigError
from tests.drills.episodes import TASK, answers, configured, player

BLOCKS = dict(name="my_lab.blocks:BashBlocks", family="qwen2")


def test_a_protocol_from_outside_plays_an_episode(outside):
    outside("A protocol")
    with player(configured(protocol=BLOCKS)) as play:
        text = "def f(x):\\n    return 2 * x\\n"
        edit = f"Let me see.\n```bash\nprintf '{text}' > solution.py; echo ok\n```"
        trajectory = play(TASK, "Hello!", edit, "```bash\nsubmit\n```")
    assert answers(trajectory) == ["write one bash block, not 0", "ok\nexit 0", "submitted"]
    assert trajectory.solved and trajectory.malformed_calls == 1
    assert trajectory.turns[0].text.endswith("<|im_start|>assistant\n")


def test_a_wrong_protocol_is_named_when_the_config_is_built(outside):
    outside("A protocol")
    for protocol, message in {
        "my_lab.blocks:BashBlock": r"protocol = .*my_lab\.blocks has no 'BashBlock'",
        "my_lab.blocks:BLOCK": r"is no rl_code\.environment\.protocols\.protocol\.Protocol",
    }.items():
        with pytest.raises(ConfigError, match=message):
            configured(protocol=protocol)
    with pytest.raises(ConfigError, match="bash blocks need terminal and submit"):
        configured(protocol=BLOCKS, tools=("write_file", "submit"))
