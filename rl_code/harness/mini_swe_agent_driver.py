"""Runs agents of the package mini-swe-agent (see ``mini_swe_agent``). It is a program of its own,
in a Python that has the package, and uses nothing else but the standard library.

It reads lines of JSON from standard input, ``{"start": n, "task": ..., "base_url": ..., "key": ...,
"model": ..., "settings": {...}}`` or ``{"kill": n}``, and writes ``{"ended": n, "status": ...,
"error": ...}``. Each agent is a child of this process, which has imported the package already.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import sys
import traceback
import urllib.error
import urllib.request
from typing import Any

# Seconds within which the endpoint answers a command, beyond any limit of an episode.
_LONGEST_S = 3600.0


def main() -> None:
    """Starts and ends agents until standard input is closed."""
    package = Package()
    say({"ready": True})
    children: dict[int, int] = {}  # number -> process
    pipes: dict[int, tuple[int, bytes]] = {}  # what a child writes to -> (number, so far)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    waiting = b""
    while True:
        for key, _ in selector.select():
            data = os.read(key.fd, 65536)
            if key.fd == 0:
                if not data:
                    for process in children.values():
                        os.kill(process, signal.SIGKILL)
                    return
                *lines, waiting = (waiting + data).split(b"\n")
                for line in map(json.loads, lines):
                    if "kill" in line:
                        process = children.get(line["kill"])
                        if process is not None:
                            os.kill(process, signal.SIGKILL)
                        continue
                    children[line["start"]], pipe = fork(package, line)
                    pipes[pipe] = (line["start"], b"")
                    selector.register(pipe, selectors.EVENT_READ)
            elif data:
                number, before = pipes[key.fd]
                pipes[key.fd] = (number, before + data)
            else:
                number, said = pipes.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                os.waitpid(children.pop(number), 0)
                outcome = json.loads(said) if said else {"status": "killed", "error": ""}
                say({"ended": number} | outcome)


def say(line: dict[str, Any]) -> None:
    """Writes a line for the host."""
    os.write(1, (json.dumps(line) + "\n").encode())


def fork(package: Package, job: dict[str, Any]) -> tuple[int, int]:
    """A child that plays an episode: (process, pipe from which its outcome is read)."""
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(write)
        return process, read
    os.close(read)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    try:
        outcome = package.play(job)
    except BaseException as error:
        traceback.print_exc()
        outcome = {"status": type(error).__name__, "error": str(error)[:2000]}
    os.write(write, json.dumps(outcome).encode())
    os._exit(0)


class Package:
    """What is used of mini-swe-agent."""

    def __init__(self) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
