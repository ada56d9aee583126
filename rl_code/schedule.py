"""Schedule of sampling: the groups of each training step, their start, and their weights.

The learner at version v makes version v + 1 from the groups of step v: from all of them and from no
others. Let k be the bound on staleness. The groups of step b may begin as soon as version b - k is
published, and not before. Therefore nothing that was sampled is ever too old and nothing is
dropped. A long episode delays its step; it never misses it. There are four modes:

  sync       k = 0: the weights that sample a step are the weights that it trains.
  one_step   k = 1: step b + 1 is sampled with exactly version b, while version b + 1 is made
             (2505.24298 calls this one-step overlap). Between steps the actor waits for weights.
  behind     k >= 1: step b + k is sampled with exactly version b, so that staleness can be studied
             apart from all that chance adds to it.
  in_flight  k >= 1: the actor takes the newest weights even in the middle of messages
             (2509.19128). Every token carries the version that sampled it.

In the first three modes the plan names the version. A group that another actor samples again is
therefore the same group, token for token.

With ``train.refill`` a step grows while the learner waits for it: where groups have nothing to
teach, further tasks are planned. Their groups are sampled by the newest weights, which are those
that the step trains. What is planned follows from groups on record, so a learner that was killed
plans the same again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax

from rl_code.config import named
from rl_code.learner.advantages import ADVANTAGES, informative
from rl_code.rollout.asynchrony import AsynchronyConfig
from rl_code.run import lineage
from rl_code.run.run import Run
from rl_code.store.errors import StoreError
from rl_code.store.group_records import GroupRecord
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.tasks.refill import RefillConfig
from rl_code.tasks.screening import TaskPool
from rl_code.types import Group


class Schedule:
    """Plans the steps of a run, in order, each as soon as the weights for it are published.

    Args:
      pool: the tasks to draw from, in the state in which ``next_step`` is to be planned.
      steps: how many steps the whole run has.
      next_step: the first step that is not planned yet.
      tasks_per_step: groups that a step trains on.
      first_group: the number of the first group that a step trains on.
      group_size: episodes of a group.
      samples: episodes of a task when it is screened.
      seed: the seed of all random keys.
      fits: whether the prompt of a task is one that can be played. A task that is drawn and is not
        gives way to the next one, so every plan, also after a restart, has the same tasks.
      refill: bounds of further tasks for a step; None for none.
      teaches: whether a group has something to teach.
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
        first_group: Callable[[int], int],
        group_size: int,
        samples: int,
        seed: int,
        fits: Callable[[int], bool] = lambda task: True,
        refill: RefillConfig | None = None,
        teaches: Callable[[Group], bool] = lambda group: True,
    ):
        self.next_step = next_step
        self._config, self._store, self._pool = config, store, pool
        self._steps, self._tasks, self._group_size, self._samples = (
            steps,
            tasks_per_step,
            group_size,
            samples,
        )
        self._first_group = first_group
        self._fits = fits
        # Tasks that were drawn and left out since ``take_metrics``.
        self._left_out = 0
        self._words = _words(jax.random.key(seed + 1))
        self._screening = jax.random.key(seed + 2)
        self._refill, self._teaches = refill, teaches
        self._refilling = jax.random.key(seed + 3)
        self._refilled: dict[str, float] = {}

    def plan(
        self, version: int, wait: Callable[[int, Sequence[int]], Sequence[GroupRecord]]
    ) -> int:
        """Plans every step that may begin now that ``version`` is published; returns how many tasks
        were screened.

        wait(step, numbers): waits for the groups of some items of a step. What they show of the
        screened tasks decides which tasks the step trains on.
        """
        screened = 0
        # Step b may begin at version b - k, so with version v the last one is step v + k.
        while self.next_step < min(version + self._config.max_staleness + 1, self._steps):
            screened += self._plan_step(self.next_step, wait)
            self.next_step += 1
        return screened

    def _plan_step(self, step: int, wait) -> int:
        in_flight = self._config.mode == "in_flight"
        version = None if in_flight else max(0, step - self._config.max_staleness)
        # Items of a step are numbered from 0: those that screen first, then those to train on.
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
                {item.task: r.group.solved for item, r in zip(items, records, strict=True)}
            )
            number += len(items)
        # Groups to train on are numbered over the whole run, whatever was screened: with the one
        # key of the run, the number of the group fixes the random stream of its episodes. So no two
        # groups of a run may have one number, also where a fork has fewer tasks in a step.
        first = self._first_group(step)
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
                for i, task in enumerate(self._draw())
            ]
        )
        return number

    def fill(
        self, step: int, wait: Callable[[int, Sequence[int]], Sequence[GroupRecord]]
    ) -> list[Item]:
        """The items that a planned step trains on. With a refill, it waits for their groups, and
        plans further ones until as many teach something as a step has, or ``most`` are planned.

        wait: as ``plan`` takes it. Raises StoreError where the step has more items than that.
        """
        planned = [item for item in self._store.items(step) if item.trained]
        if self._refill is None:
            return planned
        # A learner that was killed may have planned some of the others before.
        items = [item for item in planned if item.kind == "train"]
        taken = {item.task for item in items}
        places = itertools.count()
        words = _words(jax.random.fold_in(self._refilling, step))
        most = self._refill.most * self._tasks
        teaching = rounds = 0
        looked: list[Item] = []
        while True:
            records = wait(step, [item.number for item in items[len(looked) :]])
            teaching += sum(self._teaches(record.group) for record in records)
            looked = [*items]
            count = min(self._tasks - teaching, most - len(items))
            if count <= 0:
                break
            rounds += 1
            version = None if self._config.mode == "in_flight" else step
            first = items[-1].number + 1
            further = [
                Item(step, at, task, self._group_size, "refill", version, at, words)
                for at, task in enumerate(self._draw_further(step, count, places, taken), first)
            ]
            self._announce(further)
            items += further
        there = [item for item in self._store.items(step) if item.trained]
        if there != items:
            raise StoreError(
                f"step {step} has {len(there)} groups on record and {len(items)} by its plan: was "
                "train.refill or train.advantage another one when they were planned?"
            )
        self._refilled = {
            "tasks/drawn": float(len(items)),
            "tasks/thrown_away": float(len(items) - teaching),
            "tasks/refills": float(rounds),
        }
        return items

    def _draw_further(
        self, step: int, count: int, places: Iterator[int], taken: set[int]
    ) -> list[int]:
        """Further tasks of a step. places: of the draws for the step. taken: tasks that it has
        already; those that are drawn are added.
        """
        chosen: list[int] = []
        while len(chosen) < count:
            task = self._pool.another(step, next(places), taken)
            taken.add(task)
            if self._fits(task):
                chosen.append(task)
            else:
                self._left_out += 1
        return chosen

    def _draw(self) -> list[int]:
        """The tasks that a step trains on."""
        chosen: list[int] = []
        while len(chosen) < self._tasks:
            drawn = self._pool.draw(self._tasks - len(chosen))
            fitting = [task for task in drawn if self._fits(task)]
            self._left_out += len(drawn) - len(fitting)
            chosen += fitting
        return chosen

    def take_metrics(self) -> dict[str, float]:
        """Metrics of what was drawn: tasks/too_long (tasks left out for their prompts since the
        last call). With a refill also those of the last ``fill``: tasks/drawn (groups that were
        sampled for the step), tasks/thrown_away (those that teach nothing), and tasks/refills (how
        often more were drawn).
        """
        left_out, self._left_out = self._left_out, 0
        return {"tasks/too_long": left_out} | self._refilled

    def _announce(self, items: Sequence[Item]) -> None:
        """Writes a part of a plan. In a process of the learner that does not write the store, it
        waits until the process that does has written the same part.
        """
        if self._store.writes:
            self._store.plan(items)
        else:
            self._store.await_plan(items, self._config.work.deadline_s)


def make_schedule(
    run: Run, store: GroupStore, pool: TaskPool, next_step: int, steps: int | None = None
) -> Schedule:
    """Schedule of what the steps of a run from ``next_step`` on sample. steps: plan no further than
    this many; all steps of the run by default.
    """
    config, train = run.config, run.config.train
    advantage = named.make(ADVANTAGES, train.advantage, "config.train.advantage")
    return Schedule(
        config.asynchrony,
        store,
        pool,
        steps=train.steps if steps is None else steps,
        next_step=next_step,
        tasks_per_step=train.tasks_per_step,
        first_group=functools.partial(lineage.first_group, run.workdir, config),
        group_size=train.group_size,
        samples=train.screening.samples if train.screening else 0,
        seed=config.seed,
        fits=lambda number: run.task_sets.fits_training(run.task_sets.training[number]),
        refill=train.refill,
        teaches=functools.partial(informative, advantage=advantage),
    )


def _words(key: jax.Array) -> tuple[int, ...]:
    return tuple(jax.random.key_data(key).tolist())
