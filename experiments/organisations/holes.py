"""The files of several organisations, and what their programmers do with suggestions in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from experiments.tab.asked import Asked
from people.simulated.programmer import NAMED
from rl_code.environment.finished import FinishedEpisode
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks import infill
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream
from rl_code.types import Task


@dataclasses.dataclass(frozen=True)
class Holes(Source):
    """An endless stream of files with a hole, of one organisation after the other. Files differ
    between organisations, and nothing in a file says whose it is.
    """

    # Whose files: keys of ``simulated.programmer.NAMED``, which say what its programmers want.
    organisations: tuple[str, ...]
    split: str = "train"
    seed: int = 0
    levels: tuple[int, ...] = (1, 2, 3)
    silent: float = 0.0

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = ("infill",)

    def __post_init__(self) -> None:
        if not self.organisations or not set(self.organisations) <= NAMED.keys():
            raise ValueError(
                f"organisations={self.organisations} must be some of {', '.join(NAMED)}"
            )

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return Stream(self._task)

    def _task(self, index: int) -> Task:
        at, each = index % len(self.organisations), index // len(self.organisations)
        name = self.organisations[at]
        # an organisation's file is the same whoever else is in the stream
        number = each * len(NAMED) + list(NAMED).index(name)
        task = infill.generate(self.split, self.seed, number, self.levels, self.silent)
        meta = {**task.meta, "organisation": name}
        return dataclasses.replace(task, id=f"{name}/{task.id}", meta=meta)


@dataclasses.dataclass(frozen=True)
class AskedAtHome:
    """A signal: what a programmer of the task's organisation does, paid as ``Asked`` is."""

    # Programmers of each organisation.
    people: int = 64
    seed: int = 0

    def __call__(self, episode: FinishedEpisode) -> float:
        return self._asked(episode.task)(episode)

    def expected(self, task: Task, text: str) -> float:
        """Average reward of a suggestion; 0 for nothing."""
        return self._asked(task).expected(task, text)

    def _asked(self, task: Task) -> Asked:
        return Asked(task.meta["organisation"], self.people, self.seed)


def of(task: Task) -> str:
    """Organisation that a task belongs to."""
    return task.meta["organisation"]
