"""Sources that take their tasks from another one."""

from __future__ import annotations

import dataclasses

from rl_code.config.named import Named
from rl_code.tasks.api import find_source
from rl_code.tasks.source import Source


@dataclasses.dataclass(frozen=True)
class OfAnother(Source):
    """A source whose tasks are played, demonstrated and drilled as those of another one are."""

    # The other source.
    of: Named

    @property
    def endless(self) -> bool:  # ty: ignore[incompatible-property-override]
        """True if the other source has no end."""
        return self._source.endless

    @property
    def demonstrated(self) -> tuple[str, ...]:  # ty: ignore[incompatible-property-override]
        """Ways in which the other source's tasks are demonstrated."""
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
