"""What a source of tasks is, and one whose tasks have worlds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from absl import logging

from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.records import TaskFileError
from rl_code.types import Task

# Worlds take a while to build: how many are built between two lines of the log.
_TOLD = 50


class Source:
    """Where tasks come from. A frozen dataclass: its fields are the settings that a config gives.

    A source of one's own is such a class anywhere on Python's path, named ``package.module:Class``.
    """

    # Whether the tasks have no end: nothing may then go through all of them.
    endless: ClassVar[bool] = False
    # Whether ``demonstrations.demonstrate`` knows how to solve the tasks.
    demonstrated: ClassVar[bool] = False
    # The only agent of others that can play the tasks (``harness.api.HARNESSES``); "" for any, and
    # for episodes of our own.
    harness: ClassVar[str] = ""

    def has_drills(self) -> bool:
        """Whether some of the tasks have no tests: they can be demonstrated, but not played."""
        return False

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        """The tasks in a fixed order, the same for the same settings.

        pool: sandboxes in which code may be run. workdir: a folder in which computed results may be
        kept. Either is None if the caller has none. Raises TaskFileError for a file that cannot be
        used, SandboxFault when the sandbox fails.
        """
        raise NotImplementedError

    def one_by_one(self, pool: SandboxPool | None, workdir: Path | None) -> Iterator[Task]:
        """The tasks of ``load`` in its order, for whoever may need the first ones only. Raises as
        ``load`` does, when it comes to what is wrong.
        """
        yield from self.load(pool, workdir)

    def load_each(
        self, pool: SandboxPool | None, workdir: Path | None
    ) -> Iterator[tuple[str, Task | Refusal]]:
        """(id, task), or (id, why there is none), in the order of ``load``: for whoever wants to
        know all that is wrong (``launch.validate``). Raises as ``load`` does for what is wrong with
        a file as a whole.
        """
        for task in self.load(pool, workdir):
            yield task.id, task


class NoTask(ValueError):
    """What cannot become a task; the message says why."""

    # What is wrong, in words that many tasks share: ``launch.validate`` counts them by it.
    reason: ClassVar[str] = "cannot be built"


class Refusal(str):
    """Why there is no task, in words. reason: as of ``NoTask``."""

    reason: str

    def __new__(cls, words: str, reason: str = NoTask.reason) -> Refusal:
        refusal = super().__new__(cls, words)
        refusal.reason = reason
        return refusal


@dataclasses.dataclass(frozen=True)
class SourceOfWorlds(Source):
    """A source whose tasks have worlds. Some may not work: a repository is missing, a patch does
    not apply.

    A world takes seconds to build and disk to keep, so ids are known before: one is built when its
    task is asked for, and for tasks that ``works`` leaves out none is.

    A subclass has the methods ``count`` and ``builders``, says what they raise as ``refusals``, and
    has in ``places`` where repositories and images are.
    """

    # What a builder raises where there is no task.
    refusals: ClassVar[tuple[type[Exception], ...]] = (NoTask,)

    # A file that ``launch.validate --verdicts`` wrote: only tasks that it found to work are loaded.
    # "" for all, and then one whose world cannot be built is an error.
    works: str = ""

    def count(self) -> int:
        """How many tasks there are, those that do not work included; found without building."""
        raise NotImplementedError

    def builders(
        self, pool: SandboxPool | None, workdir: Path | None
    ) -> Iterator[tuple[str, Callable[[], Task]]]:
        """(id, what builds the task), in the order of ``load``; nothing is built for it. Raises as
        ``load`` does for what is wrong with a file as a whole.
        """
        raise NotImplementedError

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return list(self.one_by_one(pool, workdir))

    def one_by_one(self, pool: SandboxPool | None, workdir: Path | None) -> Iterator[Task]:
        working = read_working(self.works) if self.works else None
        built = 0
        for id, build in self.builders(pool, workdir):
            if working is not None and id not in working:
                continue
            try:
                task = build()
            except self.refusals as error:
                raise TaskFileError(
                    f"task {id}: {error}. python -m launch.validate --verdicts=FILE says which "
                    "tasks work, and works=FILE loads those alone"
                ) from error
            built += 1
            if built % _TOLD == 0:
                logging.info("%d tasks loaded, their worlds built", built)
            yield task

    def load_each(
        self, pool: SandboxPool | None, workdir: Path | None
    ) -> Iterator[tuple[str, Task | Refusal]]:
        for id, build in self.builders(pool, workdir):
            try:
                found: Task | Refusal = build()
            except self.refusals as error:
                reason = error.reason if isinstance(error, NoTask) else NoTask.reason
                found = Refusal(str(error), reason)
            yield id, found


def read_text(path: Path) -> str:
    """The text of one of the files that a task is made of. Raises NoTask."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NoTask(f"{path.name} cannot be read: {error}") from error


def store_of(pool: SandboxPool | None, name: str) -> LayerStore:
    """The layer store that the worlds of a source's tasks are built in. Raises TaskFileError."""
    if pool is None or pool.layers is None:
        raise TaskFileError(
            f"tasks of {name} have worlds of layers: name the folder of a layer store as "
            "sandbox.layers"
        )
    return pool.layers


def read_working(path: str) -> frozenset[str]:
    """Ids of the tasks that ``launch.validate --verdicts`` found to work. Raises TaskFileError."""
    try:
        return frozenset(json.loads(Path(path).read_text())["works"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskFileError(
            f"works={path!r}: expected a file that launch.validate --verdicts wrote: {error}"
        ) from error
