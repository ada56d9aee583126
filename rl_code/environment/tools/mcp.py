"""mcp: the tools of an MCP server, offered under its name.

The server is started in a sandbox beside the episode's (``environment.servers``) at the first call,
and stays until the episode ends. It works on a copy of the files: what the agent changed is copied
there before a call, and what the server changed is copied back after it.

The tools are listed once in each process, when the config is read, by a server that is started for
that in a sandbox without files.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from absl import logging

from rl_code.environment.sandbox.config import SandboxConfig
from rl_code.environment.sandbox.inside.world import WORKSPACE
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.sandbox.programs import ProgramsLost
from rl_code.environment.servers.companion import Companion, CompanionConfig, deadline_of
from rl_code.environment.servers.mcp_client import ListedTool, McpClient, McpError
from rl_code.environment.servers.stream import ENDED, StreamEnded
from rl_code.environment.tools.text import cut_middle, one_line
from rl_code.environment.tools.tool import Result, Tool
from rl_code.environment.tools.workspace import Workspace

_LONGEST = 400
_VERBOSE_LONGEST = 8000
_WIDTH = 400
_PREFIX = re.compile(r"[a-z][a-z0-9_]{0,30}", re.ASCII)
# Tools of one server that are offered.
_TOOLS = 200
# Most starts of a server in an episode, those after a model's calls brought it down included.
_STARTS = 4
# Seconds between two warnings of what servers print.
_SAID_S = 60


@dataclasses.dataclass(frozen=True)
class Mcp(Tool):
    """The tools of one MCP server."""

    # Beginning of the names of its tools.
    server: str
    # The program and its arguments.
    command: tuple[str, ...]
    # Programs and folders of this machine that the sandbox shows below /opt/programs: an absolute
    # path, or a name that is found beside Python or on PATH.
    programs: tuple[str, ...] = ()
    # Variables of its environment.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Tools that are offered, by the server's own names; all of them if empty.
    only: tuple[str, ...] = ()
    # True if the results of its tools are documents (``Tool.documents``).
    answers_are_documents: bool = False
    # Wall-clock seconds of one call, and of the start.
    seconds: float = 20.0
    # Limits of the server's sandbox.
    limits: CompanionConfig = dataclasses.field(default_factory=CompanionConfig)

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.server) or not self.command:
            raise ValueError(
                f"{self.server=} must be lower-case letters, digits and _, at most 31, and "
                f"{self.command=} must name a program"
            )
        if not 0 < self.seconds <= 600:
            raise ValueError(f"{self.seconds=} must be above 0 and at most 600")
        self.limits.settings(self.programs)  # raises ValueError for a program that is not there

    def members(self) -> Sequence[Tool]:
        """The server's tools that can be offered. Raises ValueError where it does not start, has
        none, or not those of ``only``.
        """
        listed = _offered(json.dumps(dataclasses.asdict(self), sort_keys=True))
        return [self._offer(tool) for tool in listed]

    def name_of(self, listed: str) -> str:
        """Name under which a tool of the server is offered here."""
        return re.sub(r"\W", "_", f"{self.server}_{listed}", flags=re.ASCII)[:64]

    def _offer(self, listed: ListedTool) -> Tool:
        """A tool of the server's. What a tool is stands in its class, so each has one."""
        name = self.name_of(listed.name)
        facts = {
            "schema": {
                "name": name,
                "description": listed.description,
                "parameters": listed.parameters,
            },
            "documents": self.answers_are_documents,
        }
        return type("OfferedTool", (McpTool,), facts)(self, listed.name)


@dataclasses.dataclass(frozen=True)
class McpTool(Tool):
    """One tool of an MCP server."""

    of: Mcp
    # Its name at the server.
    called: str

    # Nobody knows what a server does to files.
    runs_commands: ClassVar[bool] = True

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        key = ("mcp", self.of.server)
        session = workspace.keep(key, lambda: Session(self.of))
        deadline = deadline_of(workspace, self.of.seconds)
        try:
            text, ok = session.call(self.called, arguments, workspace, deadline)
        except (ProgramsLost, StreamEnded) as error:
            session.close()  # the next call starts another server
            return Result(f"{self.of.server}: {one_line(str(error), _WIDTH)}", ok=False)
        except McpError as error:
            return Result(one_line(str(error), _WIDTH), ok=False)
        longest = _VERBOSE_LONGEST if workspace.verbose else _LONGEST
        return Result(cut_middle(text, longest), ok)


class Session:
    """The server of one episode."""

    def __init__(self, config: Mcp):
        self._config = config
        self._starts = 0
        self._companion: Companion | None = None
        self._client: McpClient | None = None

    def call(
        self, name: str, arguments: Mapping[str, Any], workspace: Workspace, deadline: float
    ) -> tuple[str, bool]:
        """Result of a tool, and True if it did what was asked.

        Raises StreamEnded, ProgramsLost or McpError, ValueError or OSError for files that cannot be
        copied there or back, and SandboxFault.
        """
        companion, client = self._follow(workspace, deadline)
        companion.mark(deadline)
        result = client.call(name, arguments, deadline)
        try:
            changes = companion.pull(deadline)
            if changes.files or changes.deleted:
                workspace.put(changes)
                companion.follow(workspace.snapshot())
        except (OSError, ValueError):
            self.close()  # its files are no longer those of the episode
            raise
        return result

    def close(self) -> None:
        """Ends the server. The next call starts another."""
        if self._client is not None and self._client.told_skipped:
            message = f"the MCP server {self._config.server}: {self._client.told_skipped}"
            logging.log_every_n_seconds(logging.WARNING, "%s", _SAID_S, message)
        self._client = None
        if self._companion is not None:
            self._companion.close()
            self._companion = None

    def _follow(self, workspace: Workspace, deadline: float) -> tuple[Companion, McpClient]:
        """The server with the files as they stand, started if it does not run."""
        if self._companion is not None and self._client is not None:
            if self._companion.push(workspace.snapshot(), deadline) is not None:
                return self._companion, self._client
            self.close()
        if self._starts == _STARTS:
            raise StreamEnded(f"it ended {_STARTS} times")
        self._starts += 1
        self._companion = Companion.beside(workspace, self._config.limits, self._config.programs)
        world = workspace.task.world
        root = WORKSPACE if world is None else world.workspace
        self._client = _start(self._config, self._companion, root, deadline)
        return self._companion, self._client


def _start(config: Mcp, companion: Companion, root: str, deadline: float) -> McpClient:
    """A session with the server in a sandbox. Raises StreamEnded, ProgramsLost or McpError."""
    number, stream = companion.start(config.command, "lines", deadline, config.environment)
    try:
        return McpClient(stream, root, deadline)
    except StreamEnded as error:
        why = companion.why(number) if str(error) == ENDED else ""
        told = "; ".join(filter(None, (why or str(error), stream.told_skipped)))
        raise StreamEnded(f"it does not start: {told}") from error


@functools.cache
def _offered(text: str) -> tuple[ListedTool, ...]:
    """The tools that are offered of the server that a config describes, in JSON. The others are
    named in the log, each with its problem. Raises ValueError.
    """
    settings = json.loads(text)
    settings["limits"] = CompanionConfig(**settings["limits"])
    for name in ("command", "programs", "only"):
        settings[name] = tuple(settings[name])
    config = Mcp(**settings)
    deadline = time.monotonic() + config.seconds
    sandboxes = SandboxConfig(workers=1, **config.limits.settings(config.programs))
    with SandboxPool(sandboxes) as pool:
        companion = Companion(pool, {})
        try:
            client = _start(config, companion, WORKSPACE, deadline)
            listed = client.tools(deadline)
            if client.told_skipped:
                logging.warning("the MCP server %s: %s", config.server, client.told_skipped)
        except (StreamEnded, ProgramsLost, McpError) as error:
            raise ValueError(f"the MCP server {config.server}: {error}") from error
        finally:
            companion.close()
    return tuple(_chosen(config, listed))


def _chosen(config: Mcp, listed: Sequence[ListedTool]) -> list[ListedTool]:
    """The tools that a config offers. Only those that it wants are looked at. Raises ValueError."""
    server = f"the MCP server {config.server}"
    if not listed:
        raise ValueError(f"{server} lists no tools")
    by_name: dict[str, ListedTool] = {}
    for tool in listed:
        by_name.setdefault(tool.name, tool)
    for name in config.only:
        if name not in by_name:
            raise ValueError(f"{server} has no tool {name!r}; it has {', '.join(by_name)[:1000]}")
        if problem := by_name[name].problem:
            raise ValueError(f"{server}: the tool {name!r} cannot be offered: {problem}")
    wanted = [tool for tool in listed if not config.only or tool.name in config.only]
    found: dict[str, ListedTool] = {}
    for tool in wanted:
        name = config.name_of(tool.name)
        problem = tool.problem
        if not problem and name in found:
            problem = f"{found[name].name} has the same name here, {name}"
        if problem:
            logging.warning("%s: the tool %r is left out: %s", server, tool.name, problem)
        else:
            found[name] = tool
    if not found:
        raise ValueError(
            f"{server} lists no tool that can be offered; {wanted[0].name}: {wanted[0].problem}"
        )
    if len(found) > _TOOLS:
        raise ValueError(
            f"{server} lists {len(found)} tools; at most {_TOOLS} are offered, name them in only"
        )
    return list(found.values())
