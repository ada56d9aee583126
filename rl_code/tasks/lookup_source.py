"""Source of tasks whose constants stand in a few of many files (``lookup``)."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks import lookup
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream, check_split
from rl_code.types import Task


@dataclasses.dataclass(frozen=True)
class Stage:
    """Tasks of a curriculum of ``Lookup``: so many tasks, and what they have of their own."""

    tasks: int
    tokens: int
    matter: int
    spacing: int
    # True if the tasks are drills (``drill``), which only a warm start can use.
    drill: bool = False

    def __post_init__(self) -> None:
        if self.tasks < 1:
            raise ValueError(f"tasks={self.tasks} must be at least 1")


@dataclasses.dataclass(frozen=True)
class Lookup(Source):
    """An endless stream of functions whose constants stand in a few of many files, see
    ``lookup``.
    """

    # "train", "validation" or "test".
    split: str
    # About how many tokens the files take together.
    tokens: int
    # The most files; short tasks have fewer.
    files: int = 10
    # Number of constants that the function needs. While there are enough files, each is defined in
    # another file, and all other files do not matter.
    matter: int = 2
    # Tokens of a file for each constant that it defines; the rest are functions.
    spacing: int = 50
    # Another seed gives another stream of tasks.
    seed: int = 0
    # A curriculum: the stages of tasks at the start of the stream, one after the other.
    first: tuple[Stage, ...] = ()

    endless: ClassVar[bool] = True
    demonstrated: ClassVar[tuple[str, ...]] = ("lookup",)

    def __post_init__(self) -> None:
        check_split(self.split)
        self._sizes()

    def has_drills(self) -> bool:
        return any(stage.drill for stage in self.first)

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        sizes = self._sizes()
        ends = list(itertools.accumulate(stage.tasks for stage in self.first))

        def task(index: int) -> Task:
            stage = bisect.bisect_right(ends, index)
            drill = stage < len(ends) and self.first[stage].drill
            make = lookup.drill if drill else lookup.generate
            return make(self.split, self.seed, index, sizes[stage])

        return Stream(task)

    def _sizes(self) -> list[lookup.Size]:
        """The sizes of the tasks of each stage, and of those after them."""
        stages = [
            lookup.Size(
                stage.tokens,
                # a drill may ask for several constants of a module: few headings stand between them
                lookup.most_files(stage.tokens, self.files) if stage.drill else self.files,
                stage.matter,
                stage.spacing,
            )
            for stage in self.first
        ]
        return [*stages, lookup.Size(self.tokens, self.files, self.matter, self.spacing)]
