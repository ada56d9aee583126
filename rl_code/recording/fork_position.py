"""Position in the tasks from which a fork goes on: which are drawn already, and which steps are
planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_code.checkpoint import checkpoint
from rl_code.checkpoint import record as checkpoint_record
from rl_code.checkpoint.record import Record, folder_of
from rl_code.config import read_config
from rl_code.run import lineage
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.schedule import make_schedule
from rl_code.store.errors import StoreError
from rl_code.store.sharing import Reach
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.tasks.order import Order, order_of

# So far a task is looked for in the order of tasks.
_MOST_LEFT_OUT = 1000
# Keys on which the list of tasks depends, or what screening tells of them.
_TASKS = (
    "tasks", "protocol", "tools", "limits", "rollout.engine", "seed", "train.screening",
    "train.curriculum", "train.forgeable", "train.shuffled",
)  # fmt: skip


def at_fork(parent: Path, own: RunConfig, run: Run, step: int, reach: Reach) -> dict[str, Any]:
    """The position of a fork at ``step``, as a checkpoint of that step has it.

    Where plans are taken over, it is the parent's. Otherwise it is that after the steps before, of
    which none is planned ahead.

    own: the config of the parent. run: the fork, with its own config. Raises StoreError where the
    record does not tell.
    """
    if step == 0:
        return {"tasks": None, "planned": 0}
    folder = parent / "checkpoints"
    records = {at: checkpoint_record.read(folder_of(folder, at)) for at in checkpoint.steps(parent)}
    before = lineage.config_at(parent, own, step - 1)
    if reach != "nothing" and step in records:
        return records[step].position
    planned = step
    if reach != "nothing":
        planned = min(step + before.asynchrony.max_staleness, before.train.steps)
    config = run.config
    if _looks(before) and _looks(config):
        if reach != "nothing" or not _tasks_differ(before, config):
            return _planned_again(parent, own, before, records, step, planned)
    # Where the draws do not depend on results, the number of tasks that were drawn says all.
    pool = run.task_sets.pool(None)
    order = None
    if not _tasks_differ(before, config):
        order = order_of(len(run.task_sets.training), config.seed, shuffled=config.train.shuffled)
    drawn = _drawn(GroupStore(parent / STORE), records, planned, order)
    return {"tasks": pool.position_after(drawn), "planned": planned}


def _looks(config: RunConfig) -> bool:
    """True if the tasks that are drawn depend on the results of those before."""
    return config.train.screening is not None or config.train.curriculum is not None


def _tasks_differ(one: RunConfig, other: RunConfig) -> bool:
    return bool(read_config.diff(one, other)) and any(
        f"{key}.".startswith(f"{section}.") or f"{section}.".startswith(f"{key}.")
        for key in read_config.diff(one, other)
        for section in _TASKS
    )


def _drawn(store: GroupStore, records: dict[int, Record], planned: int, order: Order | None) -> int:
    """Number of tasks drawn when ``planned`` steps were planned.

    order: of the tasks, where the fork has those of its parent.
    """
    known = {0: 0}
    for record in records.values():
        if record.position["tasks"] is not None:
            known[record.position["planned"]] = record.position["tasks"]["drawn"]
    # Behind a plan, tasks that did not fit are found in the order; before it they would not be.
    below = [at for at in known if at <= planned and (at or len(known) == 1)]
    nearest = max(below, default=min(known, key=lambda at: abs(at - planned)))
    between = range(min(nearest, planned), max(nearest, planned))
    # Those of a refill are drawn beside the order.
    items = [item for at in between for item in store.items(at) if item.kind == "train"]
    if planned < nearest:
        return known[nearest] - len(items)
    return _behind(items, known[nearest], order)


def _behind(items: Sequence[Item], drawn: int, order: Order | None) -> int:
    """Number of tasks drawn when the last of these items was, ``drawn`` being drawn before the
    first: between them may be tasks that did not fit, which are in no plan.
    """
    for item in items:
        if order is not None:
            ahead = range(drawn, drawn + _MOST_LEFT_OUT)
            drawn = next((at for at in ahead if order[at] == item.task), drawn)
        drawn += 1
    return drawn


def _planned_again(
    parent: Path,
    own: RunConfig,
    before: RunConfig,
    records: dict[int, Record],
    step: int,
    planned: int,
) -> dict[str, Any]:
    """The position of a run with screening or a curriculum, by planning again from a checkpoint
    before. The plans are compared with those on record.
    """
    first = max((fork.step for fork in lineage.read(parent) if fork.step <= step), default=0)
    fitting = [
        at
        for at, record in records.items()
        if first <= at <= step and record.position["planned"] <= planned
    ]
    if not fitting and first:
        raise StoreError(
            f"which tasks {parent} had drawn before step {step} is no longer on record; fork at "
            f"one of the checkpoints, of steps {sorted(records)}"
        )
    start = max(fitting, default=0)
    position = records[start].position if fitting else {"tasks": None, "planned": 0}
    store = GroupStore(parent / STORE)
    with Run(before, parent, "learner") as run:
        pool = run.task_sets.pool(position["tasks"])
        schedule = make_schedule(run, store, pool, position["planned"], steps=planned)
        for at in range(start, step):
            schedule.plan(at, lambda of, numbers: [store.record(of, n) for n in numbers])
            items = [item for item in store.items(at) if item.trained]
            pool.record({item.task: store.record(at, item.number).group.solved for item in items})
        return {"tasks": pool.position(), "planned": schedule.next_step}
