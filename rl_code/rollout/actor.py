"""The actor: claims planned groups, samples each with the weights that its plan names, and delivers
them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence

from absl import logging

from rl_code.environment.episode import Episode
from rl_code.environment.sandbox.pool import SandboxUnavailable
from rl_code.rollout.asynchrony import AsynchronyConfig
from rl_code.rollout.demonstrator import Demonstrator
from rl_code.rollout.forks_config import ForksConfig
from rl_code.rollout.playing import Playing
from rl_code.rollout.stats import RolloutStats
from rl_code.store.claims import Claims
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.types import Group, Task
from rl_code.weights.versions import Subscriber

# Most groups claimed in one turn, so that actors which start together share a step.
_PORTION = 4
# Seconds between two looks for work: first the least, then longer and longer, so that idle actors
# do not load shared storage.
_POLL_S, _LONGEST_POLL_S = 0.01, 0.25
# How long there may be no work before that is said.
_SILENT_S = 60.0


@dataclasses.dataclass
class ActorStats:
    """Use of an actor's time since it was last asked."""

    # Seconds in which no group was open, and seconds of wall clock.
    idle_s: float
    total_s: float
    # The scheduler's counts.
    rollout: RolloutStats

    @property
    def idle_share(self) -> float:
        """The share of the time in which no group was open."""
        return self.idle_s / max(self.total_s, 1e-9)


class Actor:
    """Plays items of a store, a little with every ``turn``.

    tasks: by index. on_loaded: called with the version of weights that were just loaded. prepare:
    makes of a task the one that a step's episodes get. forks: where episodes that are trained on
    are forked. demonstrator: plays the last trajectory of the groups that have a demonstration;
    None for none.
    """

    def __init__(
        self,
        scheduler: Playing,
        store: GroupStore,
        work: Claims,
        weights: Subscriber,
        tasks: Sequence[Task],
        make_episode: Callable[[Task, int, int], Episode],
        config: AsynchronyConfig,
        on_loaded: Callable[[int], None] = lambda version: None,
        prepare: Callable[[Task, int], Task] = lambda task, step: task,
        forks: ForksConfig | None = None,
        demonstrator: Demonstrator | None = None,
    ):
        self._scheduler, self._store, self._work, self._weights = scheduler, store, work, weights
        self._tasks, self._make_episode = tasks, make_episode
        self._config, self._on_loaded = config, on_loaded
        self._prepare = prepare
        self._forks = forks
        self._demonstrator = demonstrator
        # Groups that lack nothing but their demonstration, by item.
        self._sampled: dict[Item, Group] = {}
        self._claimed: collections.deque[Item] = collections.deque()  # not begun
        self._faulted: set[Item] = set()  # whose episodes all ended in a fault of the sandbox
        self._loaded: int | None = None
        self._idle_since: float | None = None
        self._idle_s = 0.0
        self._since = time.perf_counter()
        # For the three fields above: the learner's thread asks for statistics while this actor's
        # thread notes when it has nothing to do.
        self._lock = threading.Lock()

    @property
    def claimed(self) -> int:
        """Items that this actor has got so far."""
        return self._work.claimed

    def turn(self) -> bool:
        """Claims, begins, samples and delivers as much as it can without waiting for work. False if
        there is nothing to do.

        Raises StoreError, WeightError, RolloutTimeout or SandboxUnavailable; episodes in progress
        stay open until ``close``.
        """
        self._work.progress()
        self._claim()
        self._begin()
        self._note_idle(not self._scheduler.groups)
        if not self._scheduler.groups:
            return self._await_demonstration() or bool(self._claimed)
        for item, group in self._scheduler.step():
            if all(trajectory.status == "fault" for trajectory in group.trajectories):
                self._play_again(item)
            elif self._has_demonstration(item):
                self._sampled[item] = group
            else:
                self._store.deliver(item, group)
        self._deliver_demonstrated()
        self._note_idle(not self._scheduler.groups)
        return True

    def run(self, over: Callable[[], bool]) -> None:
        """Turn after turn until ``over``, which is asked a few times a second."""
        pause = _POLL_S
        worked = time.monotonic()
        asked = -math.inf
        while True:
            if time.monotonic() >= asked + _LONGEST_POLL_S:
                if over():
                    return
                asked = time.monotonic()
            if self.turn():
                pause = _POLL_S
                worked = time.monotonic()
                continue
            if time.monotonic() - worked > _SILENT_S:
                logging.log_every_n_seconds(
                    logging.WARNING, "nothing to sample; is the learner running?", 60
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_POLL_S)

    def take_stats(self) -> ActorStats:
        """Since the last call, from any thread."""
        with self._lock:
            now = time.perf_counter()
            if self._idle_since is not None:
                self._idle_s, self._idle_since = self._idle_s + now - self._idle_since, now
            stats = ActorStats(self._idle_s, now - self._since, self._scheduler.take_stats())
            self._idle_s, self._since = 0.0, now
            return stats

    def close(self) -> None:
        """Gives up what is in progress; others may take it over."""
        self._scheduler.abort()
        if self._demonstrator is not None:
            self._demonstrator.close()
        self._work.close()

    def _claim(self) -> None:
        if not self._claimed and (self._scheduler.room > 0 or not self._scheduler.groups):
            self._claimed += self._work.claim(_PORTION)

    def _begin(self) -> None:
        """Begins the claimed items whose weights are loaded, or can be."""
        if self._config.mode == "in_flight" and (self._claimed or self._scheduler.groups):
            # The version never goes back, even if storage shows only older ones now: open groups
            # may need the version that is loaded. The newest version is loaded if it can be read.
            # The actor waits only for a version that the claimed items need, since the learner that
            # announced the newest may have died.
            loaded = -1 if self._loaded is None else self._loaded
            needed = max(
                (item.step - self._config.max_staleness for item in self._claimed), default=0
            )
            if max(needed, self._weights.newest() or 0) > loaded:
                self._load(at_least=max(needed, loaded, 0))
        while self._claimed:
            wanted = self._claimed[0].version
            if wanted is not None and wanted != self._loaded:
                if self._scheduler.groups:
                    return  # open groups are finished with the weights they began with
                if self._store.is_consumed(self._claimed[0].step):
                    # Another actor took the item over while this one was stopped. The weights that
                    # it needs may be deleted by now, so it is dropped.
                    self._claimed.popleft()
                    continue
                self._load(exactly=wanted)
            self._submit(self._claimed.popleft())

    def _load(self, **wanted: int) -> None:
        version, model = self._weights.wait(**wanted, deadline_s=self._config.weights.deadline_s)
        if version == self._loaded:
            return
        self._loaded = version
        self._scheduler.load(model, version, recompute=self._config.recompute)
        self._on_loaded(version)

    def _play_again(self, item: Item) -> None:
        """Samples an item once more whose episodes all ended in a fault of the sandbox, instead of
        delivering a group that nothing can be learned from. Raises SandboxUnavailable the second
        time.
        """
        task = self._tasks[item.task].id
        if item in self._faulted:
            raise SandboxUnavailable(
                f"all {item.group_size} episodes of task {task!r} ended in a fault of the sandbox, "
                "twice; does this "
                "machine have memory and processes to spare?"
            )
        logging.warning(
            "all %d episodes of task %r ended in a fault of the sandbox: again",
            item.group_size,
            task,
        )
        self._faulted.add(item)
        self._submit(item)

    def _has_demonstration(self, item: Item) -> bool:
        return self._demonstrator is not None and self._demonstrator.wanted(item)

    def _deliver_demonstrated(self) -> None:
        """Delivers the groups whose demonstrations are there."""
        for item, group in list(self._sampled.items()):
            shown = self._demonstrator.take(item)
            if shown is not None:
                del self._sampled[item]
                whole = dataclasses.replace(group, trajectories=(*group.trajectories, shown))
                self._store.deliver(item, whole)

    def _await_demonstration(self) -> bool:
        """Waits a moment for a demonstration, if a group lacks one; True if one does."""
        if not self._sampled:
            return False
        self._demonstrator.wait(_LONGEST_POLL_S)
        self._deliver_demonstrated()
        return True

    def _submit(self, item: Item) -> None:
        task = self._prepare(self._tasks[item.task], item.step)
        size = item.group_size
        if self._has_demonstration(item):
            version = self._loaded if item.version is None else item.version
            self._demonstrator.begin(item, task, version)
            size -= 1
        self._scheduler.submit(
            task,
            self._make_episode,
            group=item.group,
            group_size=size,
            key=item.seed,
            tag=item,
            forks=self._forks if item.trained else None,
        )

    def _note_idle(self, idle: bool) -> None:
        with self._lock:
            if idle and self._idle_since is None:
                self._idle_since = time.perf_counter()
            elif not idle and self._idle_since is not None:
                self._idle_s += time.perf_counter() - self._idle_since
                self._idle_since = None
