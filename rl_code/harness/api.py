"""All agents of others by name."""

from __future__ import annotations

from rl_code.config import named
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.harness.agent import Agent

# An agent is imported when a config names it.
HARNESSES = {
    "aider": "rl_code.harness.known_agents:Aider",
    "claude_code": "rl_code.harness.known_agents:ClaudeCode",
    "codex": "rl_code.harness.known_agents:Codex",
    "command_line": "rl_code.harness.command_line:CommandLine",
    "mini_swe_agent": "rl_code.harness.mini_swe_agent:MiniSweAgent",
    "opencode": "rl_code.harness.known_agents:Opencode",
    "program": "rl_code.harness.program:Program",
    "verifiers": "rl_code.harness.verifiers:Verifiers",
}


def find_agent(config: Named, path: str) -> Agent:
    """The agent that a config names, with its settings.

    path: dotted key of the config, for messages. Raises ConfigError.
    """
    agent = named.make(HARNESSES, config, path)
    if not isinstance(agent, Agent):
        raise ConfigError(f"{path} = {config.name!r}: {agent!r} is no rl_code.harness.agent.Agent")
    return agent
