"""The files an agent works on, and what its tools may still use.

Files stay in memory until a tool executes something. Only then the sandbox is opened, with the
files as they stand.
"""

from __future__ import annotations

import math
import posixpath
import time

from rl_code.environment.notes import notes_of
from rl_code.environment.sandbox.inside.files import MAX_DEPTH
from rl_code.environment.sandbox.pool import Sandbox, SandboxPool, Snapshot
from rl_code.types import Limits, Task

# Least seconds that a call gets, so that a command can start at all.
_LEAST_S = 0.1
_PATH_LENGTH = 1000  # characters
_NAME_LENGTH = 255  # bytes, the file system's limit


class RefusedPath(ValueError):
    """A path the agent may not use; the message is meant for it to read."""


class Workspace:
    """One episode's files, and what its tools know and leave behind."""

    def __init__(self, task: Task, pool: SandboxPool, limits: Limits, *, verbose: bool):
        self.task = task
        self.pool = pool
        self.limits = limits
        # Whether tools answer in sentences (large models) or in as few tokens as will do.
        self.verbose = verbose
        # Changed by run_tests.
        self.test_runs_left = limits.test_runs
        # Set by a tool that ran the visible tests: whether one failed. None where none was run.
        self.tests_failed: bool | None = None
        # The files that the tool submit handed in; None before.
        self.handed_in: Snapshot | None = None
        # Notes of earlier episodes on the same repository, and of this one; the oldest first.
        self.notes = notes_of(task)
        # When, on the clock of time.monotonic, the episode has used up its wall-clock time.
        self.deadline = math.inf
        self._files = dict(task.files)
        self._sandbox: Sandbox | None = None

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox, opened on first use."""
        if self._sandbox is None:
            self._sandbox = self.pool.open(self._files)
        return self._sandbox

    def read(self, path: str) -> str:
        """Text of a file. Raises RefusedPath, or OSError/ValueError when it is no readable text
        file.
        """
        path = self.resolve(path)
        if self._sandbox is not None:
            return self._sandbox.read_file(path)
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path]

    def write(self, path: str, text: str) -> None:
        """Writes a file. Raises RefusedPath, or OSError when the sandbox's file system refuses
        it.
        """
        path = self.resolve(path)
        if self._sandbox is not None:
            self._sandbox.write_file(path, text)
            return
        parents = {path[:i] for i, letter in enumerate(path) if letter == "/"}
        if parents & self._files.keys() or any(name.startswith(path + "/") for name in self._files):
            raise IsADirectoryError(path)
        self._files[path] = text

    def paths(self) -> list[str]:
        """Paths of all files, sorted."""
        return sorted(self._files if self._sandbox is None else self._sandbox.list_files())

    def snapshot(self) -> Snapshot:
        """All files as they stand.

        Raises SnapshotError, a ValueError, when the workspace holds what a snapshot cannot.
        """
        return dict(self._files) if self._sandbox is None else self._sandbox.snapshot()

    @property
    def timeout_s(self) -> float:
        """Wall-clock seconds that a call may take from now on."""
        return max(_LEAST_S, min(self.limits.command_s, self.deadline - time.monotonic()))

    @property
    def out_of_time(self) -> bool:
        """Whether the wall-clock or the CPU time of the episode is used up."""
        cpu_s = 0.0 if self._sandbox is None else self._sandbox.cpu_s
        return time.monotonic() >= self.deadline or cpu_s >= self.limits.episode_cpu_s

    def hand_in(self) -> None:
        """Hands in the files as they stand.

        Raises OSError or ValueError, and hands nothing in, where they cannot be read in full: the
        agent can still mend that.
        """
        self.handed_in = self.snapshot()

    def close(self) -> None:
        """Closes the sandbox if one was opened, with every process in it."""
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
