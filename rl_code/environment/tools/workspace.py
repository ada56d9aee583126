"""The files an agent works on, and what its tools may still use.

Files stay in memory until a tool executes something. Only then the sandbox is opened, with the
files as they stand. The files of a world of layers are known in the sandbox only, so there it is
opened on first use.
"""

from __future__ import annotations

import copy
import math
import posixpath
import time
from collections.abc import Callable, Hashable, Mapping

from rl_code.environment.notes import notes_of
from rl_code.environment.sandbox.inside.files import MAX_DEPTH
from rl_code.environment.sandbox.pool import Closable, File, Sandbox, SandboxPool, Snapshot
from rl_code.environment.sandbox.programs import Changes
from rl_code.environment.sandbox.snapshot import folders_of
from rl_code.types import Limits, Task

# Least seconds that a call gets, so that a command can start at all.
_LEAST_S = 0.1
_PATH_LENGTH = 1000  # characters
_NAME_LENGTH = 255  # bytes, the file system's limit


class RefusedPath(ValueError):
    """A path the agent may not use; the message is meant for it to read."""


class Workspace:
    """Files of one episode, and the state of its tools."""

    def __init__(self, task: Task, pool: SandboxPool, limits: Limits, *, verbose: bool):
        self.task = task
        self.pool = pool
        self.limits = limits
        # True if tools answer in sentences (large models), False if in as few tokens as will do.
        self.verbose = verbose
        # Changed by run_tests.
        self.test_runs_left = limits.test_runs
        # Set by a tool that ran the visible tests: whether one failed. None where none was run.
        self.tests_failed: bool | None = None
        # The files that the tool submit handed in; None before.
        self.handed_in: Snapshot | None = None
        # Notes of earlier episodes on the same repository, and of this one; the oldest first.
        self.notes = notes_of(task)
        # Time at which the episode has used up its wall-clock time, by the clock of time.monotonic.
        self.deadline = math.inf
        self._files = dict(task.files)
        self._sandbox: Sandbox | None = None
        # Objects that tools keep for the episode, each by a key of the tool's own.
        self._kept: dict[Hashable, Closable] = {}
        # CPU seconds that commands had used in the workspace that this one was forked from.
        self._cpu_s_before = 0.0
        # The files of a fork whose sandbox is not open yet; None where ``_files`` has them.
        self._forked: Snapshot | None = None

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox, opened on first use."""
        if self._sandbox is None:
            files = self._files if self._forked is None else self._forked
            self._sandbox = self.pool.open(files, self.task.world)
        return self._sandbox

    @property
    def lost(self) -> bool:
        """True if the sandbox was opened and is gone, with the files that were in it."""
        return self._sandbox is not None and self._sandbox.lost

    @property
    def _opened(self) -> Sandbox | None:
        """The sandbox if the files are there; None while they are still in memory."""
        in_memory = self.task.world is None and self._forked is None
        return self._sandbox if in_memory else self.sandbox

    def read(self, path: str) -> str:
        """Text of a file. Raises RefusedPath, or OSError/ValueError when it is no readable text
        file.
        """
        path = self.resolve(path)
        if (sandbox := self._opened) is not None:
            return sandbox.read_file(path)
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path]

    def write(self, path: str, text: str) -> None:
        """Writes a file. Raises RefusedPath, or OSError when the sandbox's file system refuses
        it.
        """
        path = self.resolve(path)
        if (sandbox := self._opened) is not None:
            sandbox.write_file(path, text)
            return
        if self._files.keys() & folders_of(path) or any(
            name.startswith(path + "/") for name in self._files
        ):
            raise IsADirectoryError(path)
        self._files[path] = text

    @property
    def texts(self) -> Mapping[str, str] | None:
        """Path -> text of all files, while they are in memory; None once the sandbox has them."""
        return None if self._opened is not None else self._files

    def paths(self, below: str = "") -> list[str]:
        """Paths of all files, sorted. below: of the file of that path, or of the files in that
        folder alone. Raises RefusedPath.
        """
        below = "" if below in ("", ".") else self.resolve(below)
        if (sandbox := self._opened) is not None:
            return sandbox.list_files(below)
        inside = f"{below}/" if below else ""
        return sorted(path for path in self._files if path == below or path.startswith(inside))

    def snapshot(self) -> Snapshot:
        """All files as they stand; in a world, the difference from its layers.

        Raises SnapshotError, a ValueError, when the workspace holds what a snapshot cannot.
        """
        if self._sandbox is not None:
            return self._sandbox.snapshot()
        return dict(self._files if self._forked is None else self._forked)

    def put(self, changes: Changes) -> None:
        """Changes many files at once, in the sandbox.

        Raises OSError or ValueError where the file system refuses it, and SandboxFault.
        """
        gone = dict.fromkeys(changes.deleted, File(b"", 0, "deleted"))
        self.sandbox.restore(gone)
        self.sandbox.restore(changes.files)

    def keep[T: Closable](self, key: Hashable, make: Callable[[], T]) -> T:
        """Object that a tool keeps for the episode under a key: made on first use, and closed with
        the workspace. A fork begins without.
        """
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def fork(self) -> Workspace:
        """Another workspace with the same files, of which as much is used up; the work of one does
        not change the other. Nothing may have been handed in yet. Its sandbox is opened when it is
        first used, so that forks which wait for their turn hold no processes.

        Raises SnapshotError for files that cannot be copied, and SandboxFault.
        """
        if self.handed_in is not None:
            raise ValueError(f"the workspace of task {self.task.id} was handed in already")
        other = copy.copy(self)
        other.notes = dict(self.notes)
        other._kept = {}
        other._files = dict(self._files)
        if self._sandbox is not None:
            other._forked = self._sandbox.snapshot()
            other._sandbox = None
            other._cpu_s_before = self._cpu_s
        return other

    @property
    def timeout_s(self) -> float:
        """Wall-clock seconds that a call may take from now on."""
        return max(_LEAST_S, min(self.limits.command_s, self.deadline - time.monotonic()))

    @property
    def out_of_time(self) -> bool:
        """True if the wall-clock or the CPU time of the episode is used up."""
        return time.monotonic() >= self.deadline or self._cpu_s >= self.limits.tools_cpu_s

    @property
    def _cpu_s(self) -> float:
        """CPU seconds that commands have used, those before a fork included."""
        return self._cpu_s_before + (0.0 if self._sandbox is None else self._sandbox.cpu_s)

    def hand_in(self) -> None:
        """Hands in the files as they stand.

        Raises OSError or ValueError, and hands nothing in, where they cannot be read in full: the
        agent can still mend that.
        """
        self.handed_in = self.snapshot()

    def close(self) -> None:
        """Closes the sandbox if one was opened, with every process in it, and what tools keep."""
        for kept in self._kept.values():
            kept.close()
        self._kept = {}
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def resolve(self, path: str) -> str:
        """The path relative to the workspace, normalised. Raises RefusedPath for one that leads out
        or is too long.
        """
        normal = posixpath.normpath(path) if path else "."
        advice = f"use a relative path such as {self.task.path}"
        if normal.split("/")[0] in ("", ".", "..") or "\0" in path:
            raise RefusedPath(f"path {path[:80]!r} is outside the workspace; {advice}")
        if len(normal) > _PATH_LENGTH or max(map(len, normal.encode().split(b"/"))) > _NAME_LENGTH:
            raise RefusedPath(f"the path is too long; {advice}")
        if normal.count("/") > MAX_DEPTH:
            raise RefusedPath(f"the path has more than {MAX_DEPTH} folders; {advice}")
        return normal
