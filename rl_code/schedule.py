"""What each training step samples, when that may begin, and with which weights.

The learner at version v makes version v + 1 from the groups of step v, all of them and no others.
With a bound of k versions on staleness, the groups of a step b may begin when version b - k is
published, and not before; nothing that was sampled is ever too old, so nothing is dropped, and a
long episode delays its step instead of missing it. Modes:

  sync       k = 0: the weights that sample a step are those it trains.
  one_step   k = 1: step b + 1 is sampled with version b exactly while version b + 1 is made
             (2505.24298 calls this one-step overlap); the actor waits for its weights between
             steps.
  in_flight  k >= 1: the actor goes on with the newest weights in the middle of messages
             (2509.19128); every token carries the version that sampled it.

In the first two a plan names the version, so a group sampled again by another actor is the same
group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax

from rl_code.store.claims import WorkConfig
from rl_code.store.group_records import GroupRecord
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.tasks.screening import TaskPool
from rl_code.types import Group
from rl_code.weights.versions import WeightsConfig

MODES = {"sync": (0, 0), "one_step": (1, 1), "in_flight": (1, None)}  # least and greatest bound


@dataclasses.dataclass(frozen=True)
class AsynchronyConfig:
    """How far sampling may run ahead of training."""

    # see the top of this file
    mode: Literal["sync", "one_step", "in_flight"] = "sync"
    # the bound k; in a run None is the least of the mode
    max_staleness: int | None = None
    # Only "in_flight": whether the keys and values of episodes in progress are computed again with
    # new weights, or kept.
    recompute: bool = False
    # when a process counts as lost, and how long the learner waits
    work: WorkConfig = WorkConfig()
    # how versions of the weights are kept
    weights: WeightsConfig = WeightsConfig()

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is not one of {', '.join(MODES)}")
        if self.recompute and self.mode != "in_flight":
            raise ValueError(
                f"recompute=True has no meaning in mode={self.mode!r}, which never swaps weights"
            )
        if self.max_staleness is None:
            return
        least, most = MODES[self.mode]
        if self.max_staleness < least or (most is not None and self.max_staleness > most):
            wanted = f"at least {least}" if most is None else str(most)
            raise ValueError(
                f"max_staleness={self.max_staleness} must be {wanted} in mode={self.mode!r}"
            )
        if self.weights.keep is not None and self.weights.keep <= self.max_staleness:
            raise ValueError(
                f"weights.keep={self.weights.keep} must be more than "
                f"max_staleness={self.max_staleness}: "
                "actors sample with versions that old"
            )


class Schedule:
    """Plans the steps of a run, in order, each as soon as the weights for it are published.

    Args:
      pool: of the tasks, as it was when ``next_step`` was about to be planned.
      steps: of the whole run.
      next_step: the first that is not planned yet.
      tasks_per_step: groups that a step trains on.
      group_size: episodes of a group.
      samples: episodes by which a task is screened.
      seed: of all random keys.
    """

    def __init__(
        self,
        config: AsynchronyConfig,
        store: GroupStore,
        pool: TaskPool,
        *,
        steps: int,
        next_step: int,
        tasks_per_step: int,
        group_size: int,
        samples: int,
        seed: int,
    ):
        self.next_step = next_step
        self._config, self._store, self._pool = config, store, pool
        self._steps, self._tasks, self._group_size, self._samples = (
            steps,
            tasks_per_step,
            group_size,
            samples,
        )
        self._words = _words(jax.random.key(seed + 1))
        self._screening = jax.random.key(seed + 2)

    def plan(
        self, version: int, wait: Callable[[int, Sequence[int]], Sequence[GroupRecord]]
    ) -> int:
        """Plans every step that may begin now that ``version`` is published; returns how many tasks
        were screened.

        wait(step, numbers): the groups of some items of a step, for the choice of its tasks.
        """
        screened = 0
        while self.next_step < min(version + self._config.max_staleness + 1, self._steps):
            screened += self._plan_step(self.next_step, wait)
            self.next_step += 1
        return screened

    def _plan_step(self, step: int, wait) -> int:
        in_flight = self._config.mode == "in_flight"
        version = None if in_flight else max(0, step - self._config.max_staleness)
        number = 0
        while tasks := self._pool.to_screen():
            words = _words(jax.random.fold_in(self._screening, step))
            items = [
                Item(step, number + i, task, self._samples, "screen", version, number + i, words)
                for i, task in enumerate(tasks)
            ]
            self._announce(items)
            records = wait(step, range(number, number + len(items)))
            self._pool.screened(
                {item.task: solved(r.group) for item, r in zip(items, records, strict=True)}
            )
            number += len(items)
        first = step * self._tasks
        self._announce(
            [
                Item(
                    step,
                    number + i,
                    task,
                    self._group_size,
                    "train",
                    version,
                    first + i,
                    self._words,
                )
                for i, task in enumerate(self._pool.draw(self._tasks))
            ]
        )
        return number

    def _announce(self, items: Sequence[Item]) -> None:
        """Writes a part of a plan, or where another process of the learner writes waits until it
        has.
        """
        if self._store.writes:
            self._store.plan(items)
        else:
            self._store.await_plan(items, self._config.work.deadline_s)


def solved(group: Group) -> tuple[int, int]:
    """(episodes solved, episodes graded) of a group."""
    graded = [trajectory for trajectory in group.trajectories if trajectory.status != "fault"]
    return sum(trajectory.solved for trajectory in graded), len(graded)


def _words(key: jax.Array) -> tuple[int, ...]:
    return tuple(jax.random.key_data(key).tolist())
