"""Chooses which tasks training draws, and in which order: all of them, or those on which the policy
can still learn.

If all episodes of a group are solved, or none, their advantages are 0 and nothing is learned.
Screening keeps a pool of tasks of which the policy solves some episodes and not others. Training
uses the pool up: a task leaves it after several groups in a row that were all solved or all failed.
When too few tasks are left, the caller samples further ones: first tasks that were never screened,
then those that were screened longest ago. Only bookkeeping happens here. The state is small and can
be written as JSON, so that a resumed run draws the same tasks.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rl_code.tasks.order import order_of


@dataclasses.dataclass(frozen=True)
class ScreeningConfig:
    """Rules by which tasks are screened, and leave the pool that training draws from."""

    # Episodes that are played of a task to screen it.
    samples: int = 8
    # Tasks that are screened at a time.
    chunk: int = 64
    # Tasks are screened until the pool has this many, and again when it has fewer. If all tasks
    # together give fewer, they are screened again when half of what they gave is used up.
    least: int = 24
    # A task leaves the pool after this many groups in a row in which all episodes were solved, or
    # none.
    retire: int = 3

    def __post_init__(self):
        if self.samples < 2:
            raise ValueError(
                f"{self.samples=} must be at least 2: one sample cannot differ from itself"
            )
        if min(self.chunk, self.least, self.retire) < 1:
            raise ValueError(f"{self.chunk=}, {self.least=} and {self.retire=} must be positive")


class TaskPool:
    """Draws indices of tasks in [0, count). With ``screening`` None every task is drawn once per
    epoch.

    With screening: call ``screened`` with what the tasks of ``to_screen`` gave until that is empty,
    then draw, and ``record`` the groups of every step. The same calls after the same ``position``
    give the same results.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        screening: ScreeningConfig | None,
        position: Mapping[str, Any] | None,
        *,
        shuffled: bool = True,
    ):
        """position: what ``position()`` returned at the point to go on from; None for the
        beginning. shuffled: whether tasks are drawn in another order than that of their source.
        """
        self._order = order_of(count, seed, shuffled=shuffled)
        self._count = count
        self._seed = seed
        self._config = screening
        self._drawn = 0
        self._epoch = 0
        self._queue: list[int] = []  # what this epoch has still to draw
        self._active: dict[int, int] = {}  # task in the pool -> uninformative groups in a row
        self._looked: dict[int, None] = {}  # screened tasks, longest ago first
        self._round: dict[int, None] = {}  # tasks screened since the pool last sufficed
        # screening starts when fewer are in the pool
        self._enough = 0 if screening is None else screening.least
        if position is not None:
            self._restore(position)

    @property
    def active(self) -> tuple[int, ...]:
        """The tasks in the pool; empty without screening."""
        return tuple(self._active)

    def to_screen(self) -> list[int]:
        """The tasks to sample next, ``samples`` episodes each; empty when the pool suffices or
        nothing is left.
        """
        if self._config is None or (not self._round and len(self._active) >= self._enough):
            return []
        return self._candidates()[: self._config.chunk]

    def screened(self, successes: Mapping[int, tuple[int, int]]) -> None:
        """Takes task -> (episodes solved, episodes graded). Tasks with some but not all solved
        enter the pool.

        Raises ValueError when all tasks have been looked at and none of them is worth training on.
        """
        if self._config is None:
            raise ValueError("there is no screening in this pool's config")
        for task, (solved, taken) in successes.items():
            self._look(task)
            self._round[task] = None
            if 0 < solved < taken:
                self._active[task] = 0
        if len(self._active) >= self._config.least:
            self._round = {}
            self._enough = self._config.least
        elif not self._candidates():
            # All tasks have been screened, and gave fewer than ``least``. They are screened again
            # only when half of what they gave is used up.
            self._round, self._enough = {}, (len(self._active) + 1) // 2
            if not self._active:
                raise ValueError(
                    f"none of {self._count} tasks is solved by some but not all of "
                    f"{self._config.samples} samples: "
                    "nothing to learn from; use easier or harder tasks, more samples, or a higher "
                    "temperature"
                )

    def _candidates(self) -> list[int]:
        """Tasks that can still be screened in this round: tasks never looked at, then those looked
        at longest ago.
        """
        order = [self._order[i] for i in range(self._count)]
        fresh = [task for task in order if task not in self._looked]
        again = [
            task for task in self._looked if task not in self._active and task not in self._round
        ]
        return fresh + again

    def draw(self, count: int) -> list[int]:
        """The next ``count`` tasks. A pool with fewer tasks repeats some; otherwise none occurs
        twice in one draw.

        Raises ValueError when the pool is empty.
        """
        if self._config is None:
            self._drawn += count
            return [self._order[i] for i in range(self._drawn - count, self._drawn)]
        if not self._active:
            raise ValueError("the pool is empty: screen tasks before drawing")
        chosen: list[int] = []
        while len(chosen) < count:
            if not self._queue:
                self._queue = self._shuffled(chosen if len(self._active) >= count else [])
            chosen.append(self._queue.pop(0))
        self._drawn += count
        return chosen

    def another(self, step: int, place: int, taken: Collection[int]) -> int:
        """A task that is drawn for a step beside those of ``draw``, which go on as if it had not
        been. It depends on the state and the arguments alone.

        place: how many were drawn so for the step. taken: tasks that the step has already; one of
        them is drawn only where there is no other.
        """
        rng = random.Random(f"{self._seed}/another/{step}/{place}")
        if self._config is not None:
            if not self._active:
                raise ValueError("the pool is empty: screen tasks before drawing")
            left = sorted(self._active.keys() - set(taken)) or sorted(self._active)
            return rng.choice(left)
        return self._from(rng.randrange(self._count), taken)

    def _from(
        self, begin: int, taken: Collection[int], fits: Callable[[int], bool] = lambda task: True
    ) -> int:
        """The first task at ``begin`` or behind it that fits and is not taken; one that is taken
        where every other is, too.
        """
        around = range(begin, begin + self._count)
        fitting = (at % self._count for at in around if fits(at % self._count))
        first = next(fitting)
        if first not in taken:
            return first
        return next((task for task in fitting if task not in taken), first)

    def record(self, successes: Mapping[int, tuple[int, int]]) -> None:
        """Takes what training saw, task -> (episodes solved, episodes graded); used-up tasks leave
        the pool.
        """
        if self._config is None:
            return
        for task, (solved, graded) in successes.items():
            if task not in self._active or not graded:
                continue
            self._look(task)
            self._active[task] = 0 if 0 < solved < graded else self._active[task] + 1
            if self._active[task] >= self._config.retire:
                del self._active[task]
                self._queue = [other for other in self._queue if other != task]

    def metrics(self) -> dict[str, float]:
        """tasks/pool (tasks in the pool; 0 without screening)."""
        return {"tasks/pool": float(len(self._active))}

    def position(self) -> dict[str, Any]:
        """The state, made of JSON's own types."""
        return {
            "count": self._count,
            "drawn": self._drawn,
            "epoch": self._epoch,
            "queue": list(self._queue),
            "active": [list(item) for item in self._active.items()],
            "looked": list(self._looked),
            "round": list(self._round),
            "enough": self._enough,
        }

    def position_after(self, drawn: int) -> dict[str, Any]:
        """The position of a new pool that goes on behind ``drawn`` tasks of another one."""
        return self.position() | {"drawn": drawn}

    def _restore(self, position: Mapping[str, Any]) -> None:
        if position["count"] != self._count:
            raise ValueError(
                f"the position is of {position['count']} tasks, there are {self._count}"
            )
        self._drawn = position["drawn"]
        self._epoch = position["epoch"]
        self._enough = position["enough"]
        self._round = dict.fromkeys(position["round"])
        self._queue = list(position["queue"])
        self._active = {task: idle for task, idle in position["active"]}
        self._looked = dict.fromkeys(position["looked"])

    def _look(self, task: int) -> None:
        """Makes ``task`` the one looked at last."""
        self._looked.pop(task, None)
        self._looked[task] = None

    def _shuffled(self, late: list[int]) -> list[int]:
        """The next epoch's order of the pool, with the tasks in ``late`` at its end."""
        tasks = sorted(self._active)
        random.Random(f"{self._seed}/{self._epoch}").shuffle(tasks)
        self._epoch += 1
        return sorted(tasks, key=lambda task: task in late)
