"""Source of small repositories with a fault to be found (``repositories``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks import repositories, repository_past
from rl_code.tasks.source import Source, store_of
from rl_code.tasks.stream import Stream, check_split
from rl_code.types import Task


@dataclasses.dataclass(frozen=True)
class Repositories(Source):
    """An endless stream of small repositories with a fault to be found, see ``repositories``."""

    # "train", "validation" or "test".
    split: str
    # Numbers of files between the symptom and the cause; one is drawn for each task, and one that
    # stands here twice is drawn twice as often.
    levels: tuple[int, ...] = repositories.LEVELS
    # The fewest and the most files of a repository.
    files: tuple[int, int] = (5, 12)
    # True if each function between the symptom and the cause has its file for itself. Otherwise
    # half of these files have another function too.
    alone: bool = False
    # Kinds of faults: an "operation" of a line, or the "name" in a call; one is drawn for each
    # task.
    faults: tuple[str, ...] = ("operation",)
    # The fewest and the most commits behind the first one, one of which made the fault; (0, 0) for
    # no history.
    changes: tuple[int, int] = (0, 0)
    # True if tasks that have a history can be played: each is then built as a layer of its own.
    # Demonstrations of many tasks need none.
    built: bool = True
    # Another seed gives another stream of tasks.
    seed: int = 0

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = ("repositories",)

    def __post_init__(self) -> None:
        check_split(self.split)
        repositories.check_settings(self.levels, self.files, self.faults, self.changes)

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        settings = (self.levels, self.files, self.alone, self.faults, self.changes)

        def make(index: int) -> Task:
            return repositories.generate(self.split, self.seed, index, *settings)

        if not self.built or self.changes == (0, 0):
            return Stream(make)
        store = store_of(pool, "repositories with a history")
        return Stream(lambda index: repository_past.with_history(make(index), store))
