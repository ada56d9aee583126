"""First tasks of another source: a list of so many, which is then played again and again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from rl_code.config.read_config import at_least
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.of_another import OfAnother
from rl_code.types import Task


@dataclasses.dataclass(frozen=True)
class First(OfAnother):
    """The first ``count`` tasks of another source, in its order; all where it has fewer."""

    # Number of tasks.
    count: int

    def __post_init__(self) -> None:
        at_least(self, count=1)

    @property
    def endless(self) -> bool:
        """False: it is a list."""
        return False

    def load(self, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
        return list(itertools.islice(self._source.one_by_one(pool, workdir), self.count))
