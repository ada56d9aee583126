"""diagnostics: what language servers say about the files, such as wrong names and wrong types.

The servers run beside the episode, in a sandbox of their own (``environment.servers``), from the
first call on. Later calls tell them what changed, so they check little anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_code.environment.sandbox.inside.world import WORKSPACE
from rl_code.environment.sandbox.pool import Snapshot
from rl_code.environment.sandbox.programs import ProgramsLost
from rl_code.environment.sandbox.snapshot import texts
from rl_code.environment.servers.companion import (
    Companion,
    CompanionConfig,
    deadline_of,
    find_program,
)
from rl_code.environment.servers.language_server import (
    LANGUAGE_SERVERS,
    WARNING,
    Diagnostic,
    LanguageServer,
    LanguageServerConfig,
)
from rl_code.environment.servers.stream import ENDED, StreamEnded
from rl_code.environment.tools.text import cut_middle, one_line
from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import RefusedPath, Workspace

_WIDTH = 100
_LONGEST = 400
_VERBOSE_WIDTH = 400
_VERBOSE_LONGEST = 8000
# Most starts of the servers in an episode, those after a model's files brought them down included.
_STARTS = 4


class Servers:
    """The language servers of one episode."""

    def __init__(self, configs: Sequence[LanguageServerConfig], limits: CompanionConfig):
        self._configs = configs
        self._limits = limits
        self._starts = 0
        self._companion: Companion | None = None
        self._running: list[LanguageServer] = []
        # Reasons why some did not start.
        self._missing: list[str] = []

    def diagnose(
        self, workspace: Workspace, paths: Sequence[str], deadline: float
    ) -> tuple[list[Diagnostic], list[str]]:
        """Diagnostics of the servers on these files, and reasons why some servers gave none.

        Raises ValueError or OSError for files that cannot be copied, and SandboxFault.
        """
        files = workspace.snapshot()
        contents = _contents(workspace, files, paths)
        self._follow(workspace, files, deadline)
        found: list[Diagnostic] = []
        ended = []
        for server in self._running:
            shown = {path: text for path, text in contents.items() if server.config.reads(path)}
            try:
                found += server.diagnose(shown, deadline)
            except StreamEnded as error:
                ended.append(f"{server.config.name}: {error}")
        problems = [*self._missing, *ended]
        if ended:  # the next call starts all of them again
            self.close()
        return sorted(found), problems

    def close(self) -> None:
        """Ends the servers. The next question starts others."""
        self._running = []
        if self._companion is not None:
            self._companion.close()
            self._companion = None

    def _follow(self, workspace: Workspace, files: Snapshot, deadline: float) -> None:
        """Tells the servers what changed, or starts them."""
        if self._companion is not None:
            try:
                changes = self._companion.push(files, deadline)
                if changes is not None:
                    for server in self._running:
                        server.changed(changes)
                    return
            except (ProgramsLost, StreamEnded):
                pass  # they are started anew
            self.close()
        if self._starts == _STARTS:
            self._missing = [f"the language servers ended {_STARTS} times"]
            return
        self._starts += 1
        self._missing = []
        programs = [name for config in self._configs for name in config.programs]
        self._companion = Companion.beside(workspace, self._limits, programs)
        for config in self._configs:
            self._start(self._companion, workspace, config, deadline)

    def _start(
        self,
        companion: Companion,
        workspace: Workspace,
        config: LanguageServerConfig,
        deadline: float,
    ) -> None:
        """Starts one server, or notes why it does not start."""
        world = workspace.task.world
        root = WORKSPACE if world is None else world.workspace
        try:
            number, stream = companion.start(
                config.command, "headers", deadline, config.environment
            )
        except ProgramsLost as error:
            self._missing.append(f"{config.name} does not start: {error}")
            return
        try:
            self._running.append(LanguageServer(stream, config, root, deadline))
        except StreamEnded as error:
            why = companion.why(number) if str(error) == ENDED else ""
            self._missing.append(f"{config.name} does not start: {why or error}")


def _contents(workspace: Workspace, files: Snapshot, paths: Sequence[str]) -> dict[str, str]:
    """Texts of files; files that are no text are left out."""
    changed = texts({path: files[path] for path in paths if path in files})
    found = {}
    for path in paths:
        try:
            found[path] = changed[path] if path in changed else workspace.read(path)
        except (OSError, ValueError):  # it is no text, or a link
            continue
    return found


def describe(
    found: Sequence[Diagnostic], problems: Sequence[str], most: int, *, verbose: bool
) -> str:
    """Diagnostics in words, one a line, and how many more there are."""
    width = _VERBOSE_WIDTH if verbose else _WIDTH
    lines = []
    for one in found[:most]:
        # The lines after the first one are advice on how to mend it.
        message = one.message.partition("\n")[0]
        at = f"{one.path}:{one.line}"
        text = f"{at}:{one.column}: {one.source}" if verbose else at
        lines.append(one_line(f"{text} {one.code} {message}", width))
    if not found and not problems:
        lines.append("no problems found" if verbose else "none")
    if len(found) > most:
        more = len(found) - most
        lines.append(f"{more} more" if verbose else f"+{more}")
    lines += [one_line(problem, _VERBOSE_WIDTH) for problem in problems]
    return cut_middle("\n".join(lines), _VERBOSE_LONGEST if verbose else _LONGEST)


@dataclasses.dataclass(frozen=True)
class Diagnostics(Tool):
    """Tool that shows the diagnostics of language servers on one file, a folder or all files."""

    # Names of ``LANGUAGE_SERVERS``, or servers of one's own.
    servers: tuple[str | LanguageServerConfig, ...] = ("ruff", "ty")
    # Most diagnostics that are shown, and the weakest severity (1 error, 2 warning, 3 information,
    # 4 hint).
    most: int = 12
    severity: int = WARNING
    # Most files that one call looks at.
    files: int = 200
    # Wall-clock seconds of one call; the first starts the servers.
    seconds: float = 10.0
    # Limits of the servers' sandbox.
    limits: CompanionConfig = dataclasses.field(default_factory=CompanionConfig)

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "diagnostics",
        "See what is wrong with the code without running it: syntax, unknown names, unused "
        "imports, wrong types. Of one file or folder, or of all files.",
        {"path": {"type": "string", "description": "File or folder; all files if left out."}},
        (),
    )
    words: ClassVar[Words | None] = Words("check", line={"path": "a path"})

    def __post_init__(self) -> None:
        if not (1 <= self.most <= 200 and 1 <= self.severity <= 4 and 1 <= self.files <= 1000):
            raise ValueError(
                f"{self.most=} must be between 1 and 200, {self.severity=} between 1 and 4, "
                f"{self.files=} between 1 and 1000"
            )
        if not 0 < self.seconds <= 60:
            raise ValueError(f"{self.seconds=} must be above 0 and at most 60")
        for config in self.configs:
            for name in config.programs:
                find_program(name)

    @property
    def configs(self) -> list[LanguageServerConfig]:
        """The servers. Raises ValueError for a name that there is not, and for two of one name."""
        found = []
        for server in self.servers:
            if isinstance(server, str):
                if server not in LANGUAGE_SERVERS:
                    raise ValueError(
                        f"there is no language server {server!r}; known: "
                        f"{', '.join(LANGUAGE_SERVERS)}, or a section of one's own"
                    )
                server = LANGUAGE_SERVERS[server]
            found.append(server)
        names = [config.name for config in found]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"servers={names} must be at least one, each with its own name")
        return found

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        configs = self.configs
        try:
            paths = workspace.paths(arguments.get("path", ""))
        except RefusedPath as error:
            return Result(str(error), ok=False)
        paths = [path for path in paths if any(config.reads(path) for config in configs)]
        if not paths:
            patterns = dict.fromkeys(name for config in configs for name in config.patterns)
            return Result(f"there is no such file ({', '.join(patterns)})", ok=False)
        servers = workspace.keep("diagnostics", lambda: Servers(configs, self.limits))
        deadline = deadline_of(workspace, self.seconds)
        found, problems = servers.diagnose(workspace, paths[: self.files], deadline)
        found = [one for one in found if one.severity <= self.severity]
        if len(paths) > self.files:
            problems.append(f"{len(paths) - self.files} files not looked at")
        text = describe(found, problems, self.most, verbose=workspace.verbose)
        return Result(text, ok=bool(found) or not problems)
