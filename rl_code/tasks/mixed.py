"""Tasks of several sources in fixed proportions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.api import find_source
from rl_code.tasks.source import Source
from rl_code.tasks.stream import Stream
from rl_code.types import Task


@dataclasses.dataclass(frozen=True)
class Mixed(Source):
    """The tasks of several sources: of each ``sum(weights)`` in a row, ``weights[i]`` are those of
    ``of[i]``, in its order. It has no end if one of them has none; else it is as long as it takes
    until each task was there once, and those of shorter sources come again.
    """

    # The sources.
    of: tuple[Named, ...]
    # Tasks of each source in a round; () for one of each.
    weights: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.of:
            raise ValueError("of=() must name at least one source")
        if self.weights and len(self.weights) != len(self.of):
            raise ValueError(f"weights={self.weights} must be {len(self.of)}, one for each source")
        if any(weight < 1 for weight in self.weights):
            raise ValueError(f"weights={self.weights} must be at least 1 each")
        harnesses = sorted({source.harness or "our own episodes" for source in self._sources})
        if len(harnesses) > 1:
            raise ConfigError(
                f"config.tasks.of: no run plays tasks of {' and of '.join(harnesses)}; mix sources "
                "of one harness"
            )

    @property
    def endless(self) -> bool:  # ty: ignore[incompatible-property-override]
        """True if one of the sources has no end."""
        return any(source.endless for source in self._sources)

    @property
    def demonstrated(self) -> tuple[str, ...]:  # ty: ignore[incompatible-property-override]
        """Ways of all sources; () where one has none."""
        ways = [source.demonstrated for source in self._sources]
        return tuple(dict.fromkeys(itertools.chain(*ways))) if all(ways) else ()

    @property
    def harness(self) -> str:  # ty: ignore[incompatible-property-override]
        """The only agent of others that can play the tasks."""
        return self._sources[0].harness

    def has_drills(self) -> bool:
        return any(source.has_drills() for source in self._sources)

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        lists = [source.load(pool, workdir) for source in self._sources]
        for named, tasks in zip(self.of, lists, strict=True):
            if not len(tasks):
                raise ConfigError(f"config.tasks.of: {named.name!r} has no tasks; leave it out")
        weights = self.weights or (1,) * len(lists)
        # one round: (source, place within the round's tasks of it)
        turns = [(at, place) for at, weight in enumerate(weights) for place in range(weight)]

        def task(index: int) -> Task:
            rounds, turn = divmod(index, len(turns))
            at, place = turns[turn]
            return lists[at][(rounds * weights[at] + place) % len(lists[at])]

        if self.endless:
            return Stream(task)
        rounds = max(-(-len(tasks) // w) for tasks, w in zip(lists, weights, strict=True))
        return [task(index) for index in range(rounds * len(turns))]

    @property
    def _sources(self) -> list[Source]:
        return [find_source(named, f"config.tasks.of[{at}]") for at, named in enumerate(self.of)]
