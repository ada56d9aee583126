"""mini_swe_agent: the package mini-swe-agent, unmodified.

It is no dependency of this project. Put it into an environment of its own:

    python -m venv mini && mini/bin/pip install mini-swe-agent==2.4.6

    harness=dict(name="mini_swe_agent", python="mini/bin/python")

The agent (``mini_swe_agent_driver.py``) is the package's ``DefaultAgent`` with its
``LitellmModel``; its environment is the package's local one, but commands go to the episode's
sandbox. It has handed in when it says so (``Submitted``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_code.harness.agent import Agent, Ending, EpisodeFacts, HarnessError
from rl_code.harness.command_chat import CommandChat
from rl_code.harness.forking import ForkingHost


@dataclasses.dataclass(frozen=True)
class MiniSweAgent(Agent):
    """The agent of the package mini-swe-agent."""

    # The Python that has the package; "" for the one that runs this.
    python: str = ""
    # How the agent calls: "tools", by the API's tool calls, or "text", by a code block in the text.
    calls: str = "tools"
    # Its templates (jinja2, with the variable ``task``); "" for those of the package.
    system: str = ""
    instance: str = ""
    observation: str = ""
    format_error: str = ""
    # Messages in a row whose action cannot be read, after which it gives up; 0 for no such limit.
    format_errors: int = 3

    def host(self) -> MiniSweAgentHost:
        if self.calls not in ("tools", "text"):
            raise HarnessError(f"harness.calls = {self.calls!r} must be 'tools' or 'text'")
        return MiniSweAgentHost(self)

    @property
    def chat(self) -> CommandChat | None:
        """Known where calls are text, and the config has the templates: those of the package are
        not here.
        """
        if self.calls != "text" or not (self.system and self.instance and self.observation):
            return None
        return CommandChat(self.system, self.instance, self.observation)


class MiniSweAgentHost(ForkingHost):
    """The process that has imported the package."""

    package = "mini-swe-agent"
    requirement = "mini-swe-agent==2.4.6"
    driver = Path(__file__).with_name("mini_swe_agent_driver.py")

    def __init__(self, agent: MiniSweAgent):
        self._agent = agent
        super().__init__(agent.python)

    @staticmethod
    def environment(folder: str) -> dict[str, str]:
        """Nothing but the loopback is asked for: no prices of models, no proxies, no keys."""
        kept = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
        return {name: os.environ[name] for name in kept if name in os.environ} | {
            "HOME": folder,
            "MSWEA_GLOBAL_CONFIG_DIR": folder,
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "NO_PROXY": "*",
        }

    def describe(self, job: EpisodeFacts) -> dict[str, Any]:
        return {"task": job.text, "settings": dataclasses.asdict(self._agent)}

    def ending(self, said: Mapping[str, Any]) -> Ending:
        done = said["status"] == "Submitted"
        cause = "" if done else f"{said['status']}: {said['error']}"
        # a process that was killed said nothing (``forking_driver``)
        return Ending(done, cause, fault=said["status"] == "killed")
