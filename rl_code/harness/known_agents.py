"""Agents of the command line that are known: how each is told the task, the endpoint and the model.

The programs are none of this project's. Put them, unmodified, into a folder of their own:

    npm install --prefix agents @openai/codex@0.171.0 opencode-ai@1.18.33 \\
        @anthropic-ai/claude-code@2.1.197
    python -m venv agents/aider && agents/aider/bin/pip install aider-chat==0.86.2

    harness=dict(name="codex", folder="agents")
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rl_code.harness.agent import Agent, HarnessError
from rl_code.harness.command_line import CommandLine, CommandLineHost

_OPENAI = (("OPENAI_API_KEY", "{key}"), ("OPENAI_API_BASE", "{url}"))
_CODEX = """
model_provider = "local"
web_search = "disabled"
check_for_update_on_startup = false
[model_providers.local]
name = "local"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
_SHORT_CODEX = """
model_instructions_file = "/tmp/codex/short.md"
agents = {enabled = false}
include_permissions_instructions = false
include_environment_context = false
features = {goals = false, shell_snapshot = false}
"""


@dataclasses.dataclass(frozen=True)
class KnownAgent(Agent):
    """An agent whose ``line`` is known."""

    # The folder that has the programs.
    folder: str = "agents"
    # True for a system prompt and tools as short as the program allows, for small models.
    short: bool = False

    @property
    def line(self) -> CommandLine:
        """The program, and what it is told."""
        raise NotImplementedError

    @property
    def sandbox(self) -> Mapping[str, Any] | None:
        return self.line.sandbox

    def host(self) -> CommandLineHost:
        line = self.line
        for path in line.programs:
            if not os.path.exists(path):
                raise HarnessError(
                    f"harness.folder = {self.folder!r}: there is no {path!r}; install the agent "
                    "there, as rl_code/harness/known_agents.py says"
                )
        return line.host()

    def _program(self, *parts: str) -> str:
        return os.path.join(self.folder, *parts)


@dataclasses.dataclass(frozen=True)
class Codex(KnownAgent):
    """OpenAI's codex, over the Responses API."""

    @property
    def line(self) -> CommandLine:
        home = "/tmp/codex"
        files = [(f"{home}/config.toml", (_SHORT_CODEX if self.short else "") + _CODEX)]
        if self.short:
            files.append((f"{home}/short.md", "Call exec_command."))
        options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        vendor = "vendor/x86_64-unknown-linux-musl/bin/codex"
        return CommandLine(
            command=("{programs}/codex", "exec", *options, "-m", "{model}", "{task}"),
            environment=(("CODEX_HOME", home), *_OPENAI),
            files=tuple(files),
            programs=(self._program("node_modules/@openai/codex-linux-x64", vendor),),
        )


@dataclasses.dataclass(frozen=True)
class Opencode(KnownAgent):
    """opencode, over chats."""

    # True to tell it the task over the Agent Client Protocol.
    acp: bool = False

    @property
    def line(self) -> CommandLine:
        options = {"baseURL": "{url}", "apiKey": "{key}"}
        limit = {"context": 131072, "output": 4096}
        model = {"name": "policy", "tool_call": True, "limit": limit}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options}
        brief = {"prompt": "Call bash.", "tools": {"*": False, "bash": True}}
        settings = {
            "model": "local/{model}",
            "small_model": "local/{model}",
            "autoupdate": False,
            "share": "disabled",
            "provider": {"local": provider | {"models": {"{model}": model}}},
            "agent": {"title": {"disable": True}, "build": brief if self.short else {}},
        }
        names = ("AUTOUPDATE", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "MODELS_FETCH")
        return CommandLine(
            command=("{programs}/opencode", *(("acp",) if self.acp else ("run", "{task}"))),
            speaks="acp" if self.acp else "",
            environment=(
                ("OPENCODE_CONFIG_CONTENT", json.dumps(settings)),
                *((f"OPENCODE_DISABLE_{name}", "1") for name in names),
            ),
            programs=(self._program("node_modules/opencode-linux-x64/bin/opencode"),),
            memory_mb=4096,
        )


@dataclasses.dataclass(frozen=True)
class ClaudeCode(KnownAgent):
    """Anthropic's Claude Code, over the Messages API."""

    @property
    def line(self) -> CommandLine:
        brief = ("--system-prompt", "Call Bash.", "--tools", "Bash", "--disable-slash-commands")
        options = ("--dangerously-skip-permissions", "--model", "{model}")
        more = brief if self.short else ()
        return CommandLine(
            command=("{programs}/claude", "-p", "{task}", *options, *more),
            environment=(
                ("ANTHROPIC_BASE_URL", "{root}"),
                ("ANTHROPIC_API_KEY", "{key}"),
                ("ANTHROPIC_SMALL_FAST_MODEL", "{model}"),
                ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
                ("DISABLE_AUTOUPDATER", "1"),
                ("IS_SANDBOX", "1"),
            ),
            programs=(self._program("node_modules/@anthropic-ai/claude-code-linux-x64/claude"),),
            memory_mb=4096,
        )


@dataclasses.dataclass(frozen=True)
class Aider(KnownAgent):
    """aider, over chats: its model writes the task's file. ``short`` changes nothing."""

    @property
    def line(self) -> CommandLine:
        quiet = ("no-check-update", "no-show-model-warnings", "analytics-disable", "no-gitignore")
        options = ("--yes-always", "--no-git", "--no-stream", *(f"--{name}" for name in quiet))
        told = ("--model", "openai/{model}", "--message", "{task}", "{path}")
        packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        return CommandLine(
            command=("{python}", "-m", "aider", *options, *told),
            environment=(
                ("PYTHONPATH", f"{{programs}}/aider/{packages}"),
                ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
                *_OPENAI,
            ),
            programs=(self._program("aider"),),
        )
