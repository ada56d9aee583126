"""All agents of others by name."""

from __future__ import annotations

from rl_code import named
from rl_code.harness.agent import Agent
from rl_code.harness.mini_swe_agent import MiniSweAgent
from rl_code.harness.program import Program
from rl_code.harness.verifiers import Verifiers
from rl_code.named import Named
from rl_code.read_config import ConfigError

HARNESSES: dict[str, type[Agent]] = {
    "mini_swe_agent": MiniSweAgent,
    "program": Program,
    "verifiers": Verifiers,
}


def find_agent(config: Named, path: str) -> Agent:
    """The agent that a config names, with its settings.

    path: dotted key of the config, for messages. Raises ConfigError.
    """
    agent = named.make(HARNESSES, config, path)
    if not isinstance(agent, Agent):
        raise ConfigError(f"{path} = {config.name!r}: {agent!r} is no rl_code.harness.agent.Agent")
    return agent
