"""First tasks of another source: a list of so many, which is then played again and again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from rl_code.config.named import Named
from rl_code.config.read_config import at_least
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.api import find_source
from rl_code.tasks.source import Source
from rl_code.types import Task


@dataclasses.dataclass(frozen=True)
class First(Source):
    """The first ``count`` tasks of another source, in its order; all where it has fewer."""

    # The other source.
    of: Named
    # Number of tasks.
    count: int

    def __post_init__(self) -> None:
        at_least(self, count=1)

    @property
    def demonstrated(self) -> bool:  # ty: ignore[incompatible-property-override]
        """True if the other source's tasks can be demonstrated."""
        return self._source.demonstrated

    @property
    def harness(self) -> str:  # ty: ignore[incompatible-property-override]
        """The only agent of others that can play the tasks."""
        return self._source.harness

    def has_drills(self) -> bool:
        return self._source.has_drills()

    @property
    def _source(self) -> Source:
        return find_source(self.of, "config.tasks.of")

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return list(itertools.islice(self._source.one_by_one(pool, workdir), self.count))
