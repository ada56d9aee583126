"""Programs beside an episode, in a sandbox of their own with a copy of the episode's files.

What an agent starts ends with its command, so that nothing runs beside it. A server that should
stay, such as a language server, therefore lives in a second sandbox. Only that one sees the
server's programs (``sandbox.programs``), and its memory, processes and CPU time are counted apart.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl_code.environment.sandbox.pool import SandboxFault, SandboxPool, Snapshot
from rl_code.environment.sandbox.programs import Changes, ProgramsLost
from rl_code.environment.servers.stream import Stream
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import World

# Kinds of files that can be copied one by one. Where a folder of the layers was deleted or
# replaced, the copy is made anew.
_SINGLE = ("file", "link", "folder")
_LEAST_S = 0.1
# Seconds that a program may take to end after it closed its output.
_EXIT_S = 1.0


@dataclasses.dataclass(frozen=True)
class CompanionConfig:
    """Limits of the sandbox beside an episode. Raises ValueError for impossible limits."""

    # MiB of address space of each process, and of memory of all of them.
    memory_mb: int = 1024
    # Processes and threads.
    processes: int = 64
    # CPU seconds of all programs in an episode. What uses up more is ended.
    cpu_s: int = 60
    # MiB that the copy of the workspace may hold.
    workspace_mb: int = 32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be at least 1")
        if self.memory_mb < 64:
            raise ValueError(f"memory_mb={self.memory_mb} must be at least 64, to start Python")

    def settings(self, programs: Sequence[str]) -> dict[str, Any]:
        """These limits as settings of a pool whose sandboxes show programs. Raises ValueError for
        one that is not there.
        """
        paths = dict.fromkeys(find_program(name) for name in programs)
        return {**dataclasses.asdict(self), "programs": tuple(paths)}


def find_program(name: str) -> str:
    """The absolute path of a program or folder: beside Python, on PATH, or as it stands.

    Raises ValueError where there is none.
    """
    if os.path.isabs(name):
        if not os.path.exists(name):
            raise ValueError(f"there is no {name!r}")
        return name
    beside = os.path.join(os.path.dirname(sys.executable), name)
    found = beside if os.path.exists(beside) else shutil.which(name)
    if found is None:
        raise ValueError(
            f"there is no program {name!r} beside {sys.executable} or on PATH; install it, or give "
            "its absolute path"
        )
    return os.path.realpath(found)


class Companion:
    """A sandbox, and programs in it that go on between calls.

    pool: of sandboxes that see the programs. files, world: what the sandbox begins with. Raises
    ValueError for files that do not fit, and SandboxFault.
    """

    def __init__(self, pool: SandboxPool, files: Snapshot, world: World | None = None):
        self._limits = pool.config
        self._files = files
        self._sandbox = pool.open(files, world)
        self._programs = self._sandbox.programs()
        self._streams: list[Stream] = []

    @classmethod
    def beside(
        cls, workspace: Workspace, config: CompanionConfig, programs: Sequence[str]
    ) -> Companion:
        """One with a copy of an episode's files.

        programs: names or paths of what is shown below /opt/programs. Raises ValueError or OSError
        for files that cannot be copied, and SandboxFault.
        """
        pool = workspace.pool.beside(**config.settings(programs))
        return cls(pool, workspace.snapshot(), workspace.task.world)

    def start(
        self,
        argv: Sequence[str],
        form: str,
        deadline: float,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[int, Stream]:
        """Starts a program; its number and its messages. form: as for Stream. Raises
        ProgramsLost.
        """
        number, channel = self._programs.start(argv, environment or {}, deadline)
        stream = Stream(channel, form)
        self._streams.append(stream)
        return number, stream

    def why(self, program: int) -> str:
        """Reason why a program that closed its output has ended, in words; "" if it has not."""
        deadline = time.monotonic() + _EXIT_S
        code = said = None
        try:
            while code is None and time.monotonic() < deadline:
                code, said = self._programs.state(program, deadline)
                if code is None:
                    time.sleep(0.005)
        except ProgramsLost as lost:
            return str(lost)
        if code is None or said is None:
            return ""
        last = said.strip().splitlines()[-1:] or ["it said nothing"]
        return f"exit code {code}: {last[0]}"

    def push(self, files: Snapshot, deadline: float) -> Changes | None:
        """Makes the copy equal to the files of the episode; what differed, or None where only a
        new companion can be made equal.

        Raises ProgramsLost, or ValueError where the files do not fit.
        """
        before = self._files
        changes = Changes(
            {path: entry for path, entry in files.items() if before.get(path) != entry},
            sorted(before.keys() - files.keys()),
        )
        touched = [*changes.files.values(), *(before[path] for path in changes.deleted)]
        if any(not isinstance(entry, str) and entry.kind not in _SINGLE for entry in touched):
            return None
        if changes.files or changes.deleted:
            self._programs.put(changes, deadline)
            self._files = dict(files)
        return changes

    def mark(self, deadline: float) -> None:
        """Lets ``pull`` begin here. Raises ProgramsLost or ValueError."""
        self._programs.mark(deadline)

    def pull(self, deadline: float) -> Changes:
        """Changes that the programs made to the copy since the mark. Raises ProgramsLost or
        ValueError.
        """
        return self._programs.changes(
            self._limits.snapshot_mb << 20, self._limits.snapshot_files, deadline
        )

    def follow(self, files: Snapshot) -> None:
        """Notes that the copy is equal to these files: what was pulled was taken over."""
        self._files = dict(files)

    def close(self) -> None:
        """Ends the programs and the sandbox. May be called twice."""
        for stream in self._streams:
            stream.close()
        try:
            self._programs.close()
        except SandboxFault:  # the pool was closed before
            pass
        finally:
            self._sandbox.close()


def deadline_of(workspace: Workspace, seconds: float) -> float:
    """Time at which a call that may take ``seconds`` must have ended, by the clock of
    time.monotonic.
    """
    return time.monotonic() + max(_LEAST_S, min(seconds, workspace.timeout_s))
