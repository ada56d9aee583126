"""The stream of episodes that the warm start is made of."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from experiments.notes.repositories import NoChange, generate, idle, note, reminded, request
from experiments.notes.walks import played
from rl_code.environment.notes import with_notes
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.demonstrations import PLAYED
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream, check_split
from rl_code.types import Task

# From an index to that of the repository which stands in for its own, beyond any that is asked for.
_OTHER = 1 << 40


@dataclasses.dataclass(frozen=True)
class Requests(Source):
    """An endless stream of tasks with demonstrations, each on a repository of its own: changes
    without notes, changes with notes, which are right here, and walks that make notes.
    """

    # "train", "validation" or "test".
    split: str
    # Another seed gives other repositories.
    seed: int = 0
    # Modules of a repository.
    files: int = 6
    # The shares of walks in idle time, and of tasks with notes.
    idle: float = 0.12
    reminded: float = 0.44

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = ("played",)

    def __post_init__(self) -> None:
        check_split(self.split)
        if min(self.idle, self.reminded) < 0 or self.idle + self.reminded > 1:
            raise ValueError(f"{self.idle=} and {self.reminded=} must be shares of a whole")
        generate(self.split, self.seed, 0, self.files)  # names what is wrong

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return Stream(self.task)

    def task(self, index: int) -> Task:
        """Task ``index``; the same for the same settings."""
        repository = generate(self.split, self.seed, index, self.files)
        kind = random.Random(f"kind/{repository.name}").random()
        if kind < self.idle:
            task = idle(repository)
        else:
            try:
                task = request(repository, 0)
            except NoChange:  # one of some hundreds; another repository stands in for it
                return self.task(index + _OTHER)
            if kind < self.idle + self.reminded:
                names = [function.name for function in repository.functions]
                notes = {name: note(repository, at) for at, name in enumerate(names)}
                task = with_notes(reminded(task), notes)
        meta = {**task.meta, PLAYED: played(repository, task)}
        return dataclasses.replace(task, meta=meta)
