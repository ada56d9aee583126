"""An agent of others from outside of the tree, as docs/adding.md adds it."""

from __future__ import annotations

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.harness.api import find_agent
from rl_code.harness.harness import Harness
from tests.drills.episodes import TASK
from tests.rl_code.harness.chats import agent_episode, say


def test_an_agent_from_outside_plays_an_episode(outside):
    outside("An agent of others")
    agent = find_agent(Named("my_lab.agents:Asker", {"most": 3}), "config.harness")
    harness = Harness(agent)
    with SandboxPool(SandboxConfig(workers=1)) as pool:
        episode = agent_episode(TASK, pool, harness)
        other = agent_episode(TASK, pool, harness, index=1)
        try:
            episode.start()
            say(episode, f"sed -i 's/return x/return 2 * x/' {TASK.path}<|im_end|>")
            assert say(episode, "done<|im_end|>") is None
            trajectory = episode.finish()
            other.start()
            assert say(other, "true<|im_end|>") and say(other, "true<|im_end|>")
            assert say(other, "true<|im_end|>") is None
            gave_up = other.finish()
        finally:
            episode.close()
            other.close()
            harness.close()
    assert (trajectory.status, trajectory.solved) == ("submitted", True)
    assert (gave_up.status, gave_up.solved) == ("agent_ended", False)


def test_a_wrong_agent_is_named(outside):
    outside("An agent of others")
    with pytest.raises(ConfigError, match=r"harness\.least: no such key"):
        find_agent(Named("my_lab.agents:Asker", {"least": 3}), "config.harness")
    with pytest.raises(ConfigError, match=r"is no rl_code\.harness\.agent\.Agent"):
        find_agent(Named("my_lab.agents:post"), "config.harness")
