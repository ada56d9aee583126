"""Plays demonstrations: episodes whose messages are given, with real tools and a real grade.

The messages follow from the task and the words of the item's random key. So whoever plays the item
of a plan again, another actor or a replay, gets the same demonstration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from absl import logging

from rl_code.environment.episode import Episode
from rl_code.store.steps import Item
from rl_code.types import Task, Trajectory

# Threads in which they are played, beside those of the scheduler.
_WORKERS = 2


class Demonstrator:
    """Demonstrations for the groups of an actor.

    Args:
      messages: the tokens of each message of a demonstration, by task and random numbers.
      make_episode: (task, group, index) -> a new episode.
      steps: how many steps have demonstrations; None for all.
    """

    def __init__(
        self,
        messages: Callable[[Task, random.Random], Sequence[Sequence[int]]],
        make_episode: Callable[[Task, int, int], Episode],
        steps: int | None = None,
    ):
        self._messages, self._make_episode, self._steps = messages, make_episode, steps
        self._executor = ThreadPoolExecutor(_WORKERS, thread_name_prefix="demonstration")
        self._playing: dict[Item, Future[Trajectory]] = {}

    def wanted(self, item: Item) -> bool:
        """True if the group of an item has a demonstration."""
        return item.trained and (self._steps is None or item.step < self._steps)

    def begin(self, item: Item, task: Task, version: int) -> None:
        """Begins to play that of an item, unless it was begun before. version: the one with which
        the rest of the group is begun.
        """
        if item not in self._playing:
            index = item.group_size - 1
            self._playing[item] = self._executor.submit(
                self.play, task, item.group, index, item.seed, version
            )

    def take(self, item: Item) -> Trajectory | None:
        """The demonstration of an item that was begun, once it is there; None before. Raises what
        it raised.
        """
        if not self._playing[item].done():
            return None
        return self._playing.pop(item).result()

    def wait(self, timeout_s: float) -> None:
        """Waits until one more is played, at most this long."""
        wait(self._playing.values(), timeout=timeout_s, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        """Gives up those that were not begun, and waits for the others."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._playing.clear()

    def play(
        self, task: Task, group: int, index: int, seed: Sequence[int], version: int
    ) -> Trajectory:
        """The demonstration of a group. seed: the words of the random key of its item."""
        rng = random.Random(f"demonstration/{tuple(seed)}/{group}")
        with contextlib.closing(self._make_episode(task, group, index)) as episode:
            episode.start()
            for message in self._messages(task, rng):
                if episode.over:
                    break
                # as a sampler would be cut
                said = list(message[: episode.budget])
                episode.step(said, [0.0] * len(said), [version] * len(said))
            if not episode.over:
                logging.info("task %s: its demonstration hands nothing in", task.id)
                episode.status = "agent_ended"
            return dataclasses.replace(episode.finish(), demonstrated=True)
