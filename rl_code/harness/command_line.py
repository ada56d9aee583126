"""command_line: any agent of the command line, unmodified, inside of the episode's sandbox.

Its program runs there with its own tools, on the episode's files. It reaches the endpoint, and
nothing else. A config says how it is told the task, the endpoint and the model: all texts of
``command``, ``environment``, ``files`` and ``stdin`` may have these places:

    {task}      the task in words
    {url}       the base URL of the APIs, with the episode's key in it: http://127.0.0.1:.../v1
    {root}      the same without /v1
    {key}       the key
    {model}     the name of the model
    {path}      the file that the task is about
    {programs}  the folder that shows ``programs``
    {python}    the interpreter inside

It hands its work in by ending with one of the codes ``ends``. With ``speaks="acp"`` the Agent
Client Protocol tells it the task over its standard input, and the end of its turn hands in.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from rl_code.environment.sandbox.bubblewrap import interpreter
from rl_code.environment.sandbox.inside.world import PROGRAMS
from rl_code.harness.agent import Agent, Ending, EpisodeFacts, HarnessError, Host
from rl_code.harness.carrier import Carrier

_PLACE = re.compile(r"\{(\w+)\}")
_PLACES = ("task", "url", "root", "key", "model", "path", "programs", "python")


@dataclasses.dataclass(frozen=True)
class CommandLine(Agent):
    """Any program of the command line."""

    # The program and its arguments.
    command: tuple[str, ...] = ()
    # Variables beside those of the sandbox, and files that it finds: pairs of a name and a text.
    environment: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    # Its standard input; "" for none.
    stdin: str = ""
    # "" for a program that is told all at its start, "acp" for one that speaks the Agent Client
    # Protocol.
    speaks: str = ""
    # The exit codes by which it hands in.
    ends: tuple[int, ...] = (0,)
    # Programs and folders of this machine that it needs, shown under {programs} by the last part of
    # their paths.
    programs: tuple[str, ...] = ()
    # Limits of its sandbox, as of the section ``sandbox``: MiB of memory and of the workspace,
    # processes and threads, CPU seconds of a whole episode.
    memory_mb: int = 2048
    workspace_mb: int = 64
    processes: int = 256
    cpu_s: int = 600
    # MiB of address space of each process: just-in-time compilers reserve far more than they use.
    address_mb: int = 1 << 20

    def host(self) -> CommandLineHost:
        if not self.command:
            raise HarnessError("harness.command = (): say which command is the agent")
        if self.speaks not in ("", "acp"):
            raise HarnessError(f"harness.speaks = {self.speaks!r} must be '' or 'acp'")
        for path in self.programs:
            if not os.path.exists(path):
                raise HarnessError(f"harness.programs: there is no {path!r}")
        for text in self._texts():
            for name in _PLACE.findall(text):
                if name not in _PLACES:
                    known = ", ".join(f"{{{place}}}" for place in _PLACES)
                    raise HarnessError(f"harness: {{{name}}} in {text!r} must be one of {known}")
        return CommandLineHost(self)

    @property
    def sandbox(self) -> Mapping[str, Any]:
        return dict(
            memory_mb=self.memory_mb,
            workspace_mb=self.workspace_mb,
            processes=self.processes,
            cpu_s=self.cpu_s,
            address_mb=self.address_mb,
            programs=tuple(os.path.abspath(path) for path in self.programs),
            loopback=True,
        )

    def _texts(self) -> list[str]:
        pairs = [text for pair in (*self.environment, *self.files) for text in pair]
        return [*self.command, self.stdin, *pairs]


class CommandLineHost(Host):
    """A program in a sandbox for each episode."""

    def __init__(self, agent: CommandLine):
        self._agent = agent

    def start(self, job: EpisodeFacts, on_end: Callable[[Ending], None]) -> Callable[[], None]:
        agent = self._agent
        places = {
            "task": job.text,
            "url": job.base_url,
            "root": job.base_url.removesuffix("/v1"),
            "key": job.api_key,
            "model": job.model,
            "path": job.task.path,
            "programs": PROGRAMS,
            "python": interpreter()[0],
        }

        def fill(text: str) -> str:
            return _PLACE.sub(lambda found: places[found[1]], text)

        told = {
            "command": [fill(word) for word in agent.command],
            "environment": {fill(name): fill(text) for name, text in agent.environment},
            "files": {fill(path): fill(text) for path, text in agent.files},
            "stdin": fill(agent.stdin),
            "speaks": agent.speaks,
            "task": job.text,
        }
        return Carrier(job.sandbox(), told, job.base_url, agent.ends, on_end).end

    def close(self) -> None:
        """Programs end with their sandboxes."""
