"""Interface of a source of tasks, and of a source whose tasks have worlds."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from absl import logging

from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.errors import SandboxFault
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.row_files import Read, RowError, TaskFileError
from rl_code.types import Task

# Worlds take a while to build: how many are built between two lines of the log.
_TOLD = 50


class Source:
    """Source of tasks. A frozen dataclass: its fields are the settings that a config gives.

    A source of one's own is such a class anywhere on Python's path, named ``package.module:Class``.
    """

    # True if the tasks have no end: nothing may then go through all of them.
    endless: ClassVar[bool] = False
    # Ways in which ``demonstrations.demonstrate`` solves the tasks, keys of its NEEDS; () where it
    # cannot.
    demonstrated: ClassVar[tuple[str, ...]] = ()
    # The only agent of others that can play the tasks (``harness.api.HARNESSES``); "" for any, and
    # for episodes of our own.
    harness: ClassVar[str] = ""

    def has_drills(self) -> bool:
        """True if some of the tasks have no tests: they can be demonstrated, but not played."""
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
    """Error: a row cannot become a task; the message says why."""

    # The fault, in words that many tasks share: ``launch.validate`` counts them by it.
    reason: ClassVar[str] = "cannot be built"


class Refusal(str):
    """Reason why there is no task, in words. reason: as of ``NoTask``."""

    reason: str

    def __new__(cls, words: str, reason: str = NoTask.reason) -> Refusal:
        refusal = super().__new__(cls, words)
        refusal.reason = reason
        return refusal


# Why there is no task where a row of a file cannot be read, and where the sandbox failed.
UNREADABLE = "cannot be read"
FAULT = "the sandbox failed"


@dataclasses.dataclass(frozen=True)
class SourceOfRows(Source):
    """A source with a task in each row of a file.

    A row that cannot be read is an error of ``load``, which names it, or is left out by ``works``;
    ``load_each`` gives the reason, and the tasks of the other rows. A subclass has ``read``, and
    ``finish`` for what is done to all tasks together.
    """

    # A file that ``launch.validate --verdicts`` wrote: only tasks that it found to work are loaded.
    # "" for all, and then a row that cannot be read is an error.
    works: str = dataclasses.field(default="", kw_only=True)

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        """(id, task) of each row, or why there is none. Raises TaskFileError for the whole file."""
        raise NotImplementedError

    def finish(
        self, every: Sequence[Task], pool: SandboxPool | None, workdir: Path | None
    ) -> Sequence[Task]:
        """The tasks that are loaded, of all that could be read."""
        return every

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        working = read_working(self.works) if self.works else None
        tasks = []
        for _, found in self.read(pool):
            if not isinstance(found, RowError):
                tasks.append(found)
            elif working is None:
                raise TaskFileError(f"{found}. {_ADVICE}") from found
        finished = self.finish(tasks, pool, workdir)
        return [task for task in finished if working is None or task.id in working]

    def load_each(
        self, pool: SandboxPool | None, workdir: Path | None
    ) -> Iterator[tuple[str, Task | Refusal]]:
        tasks = []
        for id, found in self.read(pool):
            if isinstance(found, RowError):
                yield id, Refusal(str(found), UNREADABLE)
            else:
                tasks.append(found)
        for task in self.finish(tasks, pool, workdir) if tasks else ():
            yield task.id, task


_ADVICE = (
    "python -m launch.validate --verdicts=FILE says which tasks work, and works=FILE loads those "
    "alone"
)


def builders_of[T](
    rows: Iterable[tuple[str, T | RowError]], build: Callable[[T], Task]
) -> Iterator[tuple[str, Callable[[], Task]]]:
    """(id, what builds the task) of each row; for one that cannot be read, that raises why."""

    def built(found: T | RowError) -> Task:
        if isinstance(found, RowError):
            raise found
        return build(found)

    for id, found in rows:
        yield id, functools.partial(built, found)


@dataclasses.dataclass(frozen=True)
class SourceOfWorlds(Source):
    """A source whose tasks have worlds. Some may not work: a repository is missing, a patch does
    not apply.

    A world takes seconds to build and disk to keep, so ids are known before: one is built when its
    task is asked for, and for tasks that ``works`` leaves out none is.

    A subclass has the methods ``count`` and ``builders``, says what they raise as ``refusals``, and
    has in ``places`` where repositories and images are.
    """

    # Errors that a builder raises where there is no task.
    refusals: ClassVar[tuple[type[Exception], ...]] = (NoTask,)

    # A file that ``launch.validate --verdicts`` wrote: only tasks that it found to work are loaded.
    # "" for all, and then one whose world cannot be built is an error.
    works: str = ""

    def count(self) -> int:
        """Number of tasks, those that do not work included; found without building."""
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
            found = self._built(build)
            if isinstance(found, Refusal):
                if found.reason == FAULT:
                    raise SandboxFault(f"task {id}: {found}")
                raise TaskFileError(f"task {id}: {found}. {_ADVICE}")
            built += 1
            if built % _TOLD == 0:
                logging.info("%d tasks loaded, their worlds built", built)
            yield found

    def load_each(
        self, pool: SandboxPool | None, workdir: Path | None
    ) -> Iterator[tuple[str, Task | Refusal]]:
        for id, build in self.builders(pool, workdir):
            yield id, self._built(build)

    def _built(self, build: Callable[[], Task]) -> Task | Refusal:
        """A task, or why it cannot be built. Raises TaskFileError for the source as a whole."""
        try:
            return build()
        except RowError as error:
            return Refusal(str(error), UNREADABLE)
        except self.refusals as error:
            reason = error.reason if isinstance(error, NoTask) else NoTask.reason
            return Refusal(str(error), reason)
        except TaskFileError:
            raise
        except SandboxFault as fault:
            return Refusal(str(fault), FAULT)
        except Exception as error:  # a task may hold anything: each has a verdict of its own
            return Refusal(f"{type(error).__name__}: {error}"[:300])


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
