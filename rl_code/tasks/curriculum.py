"""A curriculum: kinds of tasks of which the policy solves some episodes and not others are drawn
more often.

Tasks are sorted into kinds by a value of their ``meta``, such as the level of a generated task. How
often the policy solves a kind is estimated from the groups that it was trained on, the latest ones
counting most. A group of G episodes, each solved with probability p, is mixed (neither all solved
nor none, so that its advantages are not all 0) with probability

    1 - p^G - (1 - p)^G,

and kinds are drawn in proportion to that. Each is drawn at least now and then, so that its estimate
does not grow old. Screening (``screening``) looks at each task of a list instead. A curriculum also
serves streams without an end, of which no task comes twice.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rl_code.tasks.screening import TaskPool
from rl_code.types import Task

# Kinds are those of all tasks of a list, and of so many tasks of a longer list or a stream.
_LIST = 4096
_SAMPLE = 512


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """Settings for drawing tasks by the policy's success on their kinds."""

    # The key of ``Task.meta`` whose value is the kind of a task.
    by: str = "level"
    # Share of earlier steps that an estimate keeps: after each step, older episodes count this much
    # less.
    memory: float = 0.8
    # The share of tasks that is drawn evenly from all kinds, whatever the estimates are.
    evenly: float = 0.2

    def __post_init__(self):
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory={self.memory} must be at least 0 and below 1")
        if not 0 < self.evenly <= 1:
            raise ValueError(
                f"evenly={self.evenly} must be above 0, or a kind is never looked at again, and at "
                "most 1"
            )


class Curriculum(TaskPool):
    """Draws indices of tasks by kind. Within a kind every task is drawn once per epoch.

    The same calls after the same ``position`` give the same results.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        config: CurriculumConfig,
        group_size: int,
        position: Mapping[str, Any] | None,
    ):
        """group_size: G, the episodes of a group. position: what ``position()`` returned at the
        point to go on from; None for the beginning.

        Raises:
          ValueError: a task has no such key, or all tasks are of one kind.
        """
        super().__init__(len(tasks), seed, None, None)
        self._tasks = tasks
        self._by = config.by
        self._curriculum = config
        self._group_size = group_size
        looked = len(tasks) if len(tasks) <= _LIST else _SAMPLE
        found = {self._kind(self._order[i]) for i in range(looked)}
        if len(found) < 2:
            raise ValueError(
                f"curriculum.by={config.by!r}: all tasks that were looked at ({looked}) are of one "
                f"kind, {found.pop()}; name a key of their meta that has several values"
            )
        self._kinds = sorted(found)
        # kind -> place in the order of tasks from which on its next task is looked for
        self._next = dict.fromkeys(self._kinds, 0)
        # kind -> [episodes solved, episodes graded], older ones counting less
        self._seen = {kind: [0.0, 0.0] for kind in self._kinds}
        if position is not None:
            self._continue(position)

    def rates(self) -> dict[str, float]:
        """Kind -> estimated share of its episodes that the policy solves; 0.5 of one that was never
        played. (The mean of a beta distribution whose prior is uniform.)
        """
        return {kind: (won + 1) / (played + 2) for kind, (won, played) in self._seen.items()}

    def shares(self) -> dict[str, float]:
        """Kind -> its share of the tasks that are drawn next; together 1."""
        size = self._group_size
        mixed = {kind: 1 - p**size - (1 - p) ** size for kind, p in self.rates().items()}
        total = sum(mixed.values())
        even = self._curriculum.evenly
        # Groups of one episode are never mixed: all kinds are then drawn alike.
        return {
            kind: even / len(mixed) + (1 - even) * (one / total if total else 1 / len(mixed))
            for kind, one in mixed.items()
        }

    def draw(self, count: int) -> list[int]:
        """The next ``count`` tasks.

        How many there are of each kind differs from its share by less than one (systematic
        sampling: one random offset, and steps of 1 / count through the shares side by side).
        """
        offset = random.Random(f"{self._seed}/curriculum/{self._drawn}").random()
        ends = list(itertools.accumulate(self.shares().values()))
        places = ((offset + i) / count for i in range(count))
        # rounding may leave the last end a little below 1
        numbers = [min(bisect.bisect_right(ends, at), len(ends) - 1) for at in places]
        self._drawn += count
        return [self._take(self._kinds[number]) for number in numbers]

    def another(self, step: int, place: int, taken: Collection[int]) -> int:
        """As ``TaskPool.another``: a kind by its share, then any task of it."""
        rng = random.Random(f"{self._seed}/another/{step}/{place}")
        shares = self.shares()
        (kind,) = rng.choices(list(shares), list(shares.values()))
        begin = rng.randrange(self._count)
        return self._from(begin, taken, lambda task: self._kind(task) == kind)

    def record(self, successes: Mapping[int, tuple[int, int]]) -> None:
        """Takes what a step of training saw, task -> (episodes solved, episodes graded)."""
        for seen in self._seen.values():
            seen[:] = [count * self._curriculum.memory for count in seen]
        for task, (solved, graded) in successes.items():
            kind = self._kind(task)
            if kind in self._seen:  # of a stream there may be kinds that are rare
                self._seen[kind][0] += solved
                self._seen[kind][1] += graded

    def metrics(self) -> dict[str, float]:
        """tasks/pass_rate_<kind> (the estimates) and tasks/share_<kind>."""
        rates = {f"tasks/pass_rate_{kind}": rate for kind, rate in self.rates().items()}
        return rates | {f"tasks/share_{kind}": share for kind, share in self.shares().items()}

    def position(self) -> dict[str, Any]:
        """The state, made of JSON's own types."""
        seen = {kind: list(counts) for kind, counts in self._seen.items()}
        return {
            "count": self._count,
            "drawn": self._drawn,
            "next": dict(self._next),
            "seen": seen,
        }

    def position_after(self, drawn: int) -> dict[str, Any]:
        """The position of a new pool that goes on behind ``drawn`` tasks of another one."""
        return self.position() | {"drawn": drawn, "next": dict.fromkeys(self._kinds, drawn)}

    def _continue(self, position: Mapping[str, Any]) -> None:
        if position["count"] != self._count:
            raise ValueError(
                f"the position is of {position['count']} tasks, there are {self._count}"
            )
        self._drawn = position["drawn"]
        self._next |= position["next"]
        self._seen |= {kind: list(counts) for kind, counts in position["seen"].items()}

    def _take(self, kind: str) -> int:
        """The next task of a kind."""
        at = self._next[kind]
        while self._kind(task := self._order[at]) != kind:
            at += 1
        self._next[kind] = at + 1
        return task

    def _kind(self, task: int) -> str:
        meta = self._tasks[task].meta
        if self._by not in meta:
            raise ValueError(
                f"curriculum.by={self._by!r}: task {self._tasks[task].id!r} has no such key in its "
                f"meta; it has {', '.join(map(str, meta))}"
            )
        return str(meta[self._by])
