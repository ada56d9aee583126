"""Calls of the package mini-swe-agent (see ``mini_swe_agent``). It is run by
``forking_driver`` in a Python that has the package, and uses nothing else but the standard library.

An episode is told by ``{"task": ..., "base_url": ..., "key": ..., "model": ..., "settings":
{...}}``, and ends with ``{"status": ..., "error": ...}``.
"""

from __future__ import annotations

import importlib
import json
import urllib.request
from collections.abc import Callable
from typing import Any

# Seconds within which the endpoint answers a command, beyond any limit of an episode.
_LONGEST_S = 3600.0


class Package:
    """The parts that are used of mini-swe-agent."""

    def __init__(self) -> None:
        sandbox_templates()  # before the package takes them by name

        def find(module: str, name: str) -> Any:
            return getattr(importlib.import_module(f"minisweagent.{module}"), name)

        self.agent = find("agents.default", "DefaultAgent")
        self.models = {
            "tools": find("models.litellm_model", "LitellmModel"),
            "text": find("models.litellm_textbased_model", "LitellmTextbasedModel"),
        }
        self.local = find("environments.local", "LocalEnvironment")
        config = find("config", "get_config_from_spec")
        self.configs = {"tools": config("mini.yaml"), "text": config("mini_textbased.yaml")}

    def prepare(self, job: dict[str, Any]) -> Callable[[], dict[str, str]]:
        """Player of an episode."""
        return lambda: self.play(job)

    def play(self, job: dict[str, Any]) -> dict[str, str]:
        """Plays an episode; says how the agent ended it."""
        settings = job["settings"]
        config = self.configs[settings["calls"]]
        agent = {
            "system_template": settings["system"] or config["agent"]["system_template"],
            "instance_template": settings["instance"] or config["agent"]["instance_template"],
            "cost_limit": 0.0,
            "max_consecutive_format_errors": settings["format_errors"],
        }
        model = {
            key: settings[name] or config["model"][key]
            for key, name in (
                ("observation_template", "observation"),
                ("format_error_template", "format_error"),
            )
        }
        endpoint = {"api_base": job["base_url"], "api_key": job["key"], "drop_params": True}
        made = self.agent(
            self.models[settings["calls"]](
                model_name=f"openai/{job['model']}", model_kwargs=endpoint, **model
            ),
            sandbox_environment(self.local, job["base_url"]),
            **agent,
        )
        done = made.run(job["task"])
        return {"status": str(done.get("exit_status", "")), "error": ""}


def sandbox_templates() -> None:
    """Lets jinja2 render all templates in its sandbox: those of a config may come from anybody."""
    jinja2 = importlib.import_module("jinja2")
    environment = importlib.import_module("jinja2.sandbox").ImmutableSandboxedEnvironment

    def sandboxed(source: str, **settings: Any) -> Any:
        return environment(**settings).from_string(source)

    jinja2.Template = sandboxed


def sandbox_environment(local: Any, base_url: str) -> Any:
    """The package's local environment, whose commands run in the episode's sandbox."""

    class SandboxEnvironment(local):
        def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict:
            command = action.get("command", "")
            body = json.dumps({"command": f"cd {cwd} && {command}" if cwd else command}).encode()
            request = urllib.request.Request(
                f"{base_url}/execute", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=_LONGEST_S) as answer:
                done = json.loads(answer.read())
            output = {"output": done["output"], "returncode": done["returncode"]}
            output["exception_info"] = done["error"]
            self._check_finished(output)
            return output

        def get_template_vars(self, **kwargs: Any) -> dict:
            # The same on every machine, so that all episodes of a task have the same prompt.
            system = {"system": "Linux", "release": "", "version": "", "machine": "x86_64"}
            return self.config.model_dump() | system | kwargs

    return SandboxEnvironment()
