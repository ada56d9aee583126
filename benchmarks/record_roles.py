"""The processes of ``benchmarks.record``: a learner that trains on nothing, and actors that sample
nothing. Run as ``python -m benchmarks.record_roles <settings as JSON>``; prints its counts as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.counted_storage import Counts
from rl_code.rollout.actor import Actor
from rl_code.rollout.asynchrony import AsynchronyConfig
from rl_code.rollout.stats import RolloutStats
from rl_code.store.claims import Claims
from rl_code.store.compaction import Compaction
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.types import Context, Group, Reward, Task, Tests, Trajectory, Turn

SAMPLES = 2  # trajectories of a group
SLOTS = 32  # trajectories that an actor samples at once


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a process."""

    role: str  # "learner" or "actors"
    folder: str  # of the store
    history: int  # steps that are in shards already, each in one
    steps: int
    groups: int
    tokens: int  # of a trajectory
    actors: tuple[str, ...]  # all of them, or those of this process
    sample_s: float  # that an actor takes for each turn of its loop


# --- Groups ---------------------------------------------------------------------------------------


def items_of(step: int, count: int) -> list[Item]:
    """The plan of a step."""
    return [Item(step, n, 0, SAMPLES, "train", 0, count * step + n, (1, 2)) for n in range(count)]


def task_of_all() -> Task:
    """The only task."""
    return Task(
        id="task",
        messages=({"role": "user", "content": "Write a function that adds two numbers."},),
        files={"a.py": "def add(a, b): ..."},
        path="a.py",
        entry_point="add",
        tools=("write_file",),
        visible_tests=Tests(),
        hidden_tests=Tests((), ("assert add(1, 2) == 3",)),
        reference={"a.py": "def add(a, b): return a + b"},
    )


def group_of(item: Item, task: Task, tokens: int, version: int) -> Group:
    """A group that answers an item: random tokens, the second half sampled by a version."""
    rng = np.random.default_rng(item.group)
    sampled = np.arange(tokens) >= tokens // 2
    members = tuple(
        Trajectory(
            task_id=task.id,
            group=item.group,
            index=index,
            contexts=(
                Context(
                    tokens=rng.integers(0, 50_000, tokens).astype(np.int32),
                    sampled=sampled,
                    logprobs=np.where(sampled, -rng.random(tokens), 0.0).astype(np.float32),
                    versions=np.where(sampled, version, -1).astype(np.int32),
                ),
            ),
            prompt_length=tokens // 2,
            turns=(
                Turn("prompt", 0, tokens // 2, "Write a function."),
                Turn("assistant", tokens // 2, tokens, "def add(a, b): return a + b"),
            ),
            status="submitted",
            reward=Reward(1.0, {"tests": 1.0}),
            solved=True,
        )
        for index in range(item.group_size)
    )
    return Group(task, members)


# --- The actors -----------------------------------------------------------------------------------


class InstantScheduler:
    """Takes the place of ``rollout.scheduler.Scheduler``: each turn finishes one group."""

    def __init__(self, tokens: int, sample_s: float):
        self._tokens, self._sample_s = tokens, sample_s
        self._open: list[tuple[Item, Task]] = []
        self._version = -1

    @property
    def groups(self) -> int:
        return len(self._open)

    @property
    def room(self) -> int:
        return SLOTS - SAMPLES * len(self._open)

    def submit(self, task: Task, make_episode: Any, *, tag: Item, **rest: Any) -> None:
        self._open.append((tag, task))

    def step(self) -> list[tuple[Item, Group]]:
        time.sleep(self._sample_s)
        item, task = self._open.pop(0)
        return [(item, group_of(item, task, self._tokens, self._version))]

    def load(self, model: Any, version: int, *, recompute: bool = False) -> None:
        self._version = version

    def abort(self) -> None:
        self._open.clear()

    def take_stats(self) -> RolloutStats:
        return RolloutStats()


class NoWeights:
    """Takes the place of a subscriber: version 0 is there and is nothing."""

    fetched = None

    def newest(self) -> int:
        return 0

    def wait(self, **wanted: Any) -> tuple[int, None]:
        return 0, None


def act(settings: Settings, counts: Counts) -> dict[str, Any]:
    """Actors in threads until the last step is consumed. They wait for the first plan when they
    begin to count.
    """
    config = AsynchronyConfig(mode="one_step", max_staleness=1)
    task = task_of_all()
    last = settings.history + settings.steps - 1

    def run(name: str) -> None:
        store = GroupStore(settings.folder, name)
        scheduler = InstantScheduler(settings.tokens, settings.sample_s)
        actor = Actor(
            scheduler, store, Claims(store, config.work), NoWeights(), [task], None, config
        )
        joined.wait()
        actor.run(lambda: store.is_consumed(last))
        actor.close()

    joined = threading.Barrier(len(settings.actors), action=counts.reset)
    threads = [threading.Thread(target=run, args=(name,)) for name in settings.actors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"counts": counts.total}


# --- The learner ----------------------------------------------------------------------------------


def fill(store: GroupStore, settings: Settings) -> None:
    """Steps that are consumed and in shards: the run is that old."""
    task = task_of_all()
    for step in range(settings.history):
        (item,) = items_of(step, 1)
        store.plan([item])
        store.deliver(item, group_of(item, task, settings.tokens, version=0))
        store.consume(step, store.wait(step, 60.0), version=step)
    Compaction(store.process, store.folder, 1).run()


def learn(settings: Settings, counts: Counts) -> dict[str, Any]:
    """Plans, waits for and consumes one step after another."""
    store = GroupStore(settings.folder, "learner")
    fill(store, settings)
    (Path(settings.folder).parent / "ready").touch()
    heartbeats = Path(settings.folder) / "processes"
    while len(list(heartbeats.glob("actor-*/0.json"))) < len(settings.actors):
        time.sleep(0.2)
    time.sleep(2.0)
    counts.reset()
    seconds, files, size = [], [], []
    for step in range(settings.history, settings.history + settings.steps):
        begin = time.perf_counter()
        store.plan(items_of(step, settings.groups))
        records = store.wait(step, 7200.0)
        store.consume(step, records, version=0)
        seconds.append(time.perf_counter() - begin)
        paths = [path for path in Path(settings.folder, "steps", f"{step:08}").rglob("*")]
        found = [path.lstat() for path in paths if path.is_file()]
        files.append(len(found))
        size.append(sum(stat.st_size for stat in found))
        print(f"step {step}: {seconds[-1]:.1f} s, {files[-1]} files", file=sys.stderr, flush=True)
    return {"counts": counts.total, "seconds": seconds, "files": files, "bytes": size}


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    counts = Counts(settings.folder)
    result = learn(settings, counts) if settings.role == "learner" else act(settings, counts)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
