"""Sources of the learner's groups: an actor in its own thread, an actor in another thread of its
process, or other processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
from absl import logging

from rl_code.host.stop import StopRequest
from rl_code.rollout.actor import Actor, ActorStats
from rl_code.store.group_records import GroupRecord
from rl_code.store.store import GroupStore

# How long groups of other processes may take before the learner says that it waits for them.
_SILENT_S = 60.0


class GroupSource(Protocol):
    """The groups of planned steps. A context manager, which ends what it began."""

    def wait(self, step: int, numbers: Sequence[int] | None = None) -> list[GroupRecord]:
        """The groups of a step, or of some of its items, as soon as all are there.

        Raises StoreTimeout after the deadline, and whatever an actor of this process raised.
        """

    def take_stats(self) -> ActorStats | None:
        """Metrics of the actor of this process, since the last call; None when there is none."""

    def __enter__(self) -> GroupSource: ...
    def __exit__(self, *_: object) -> None: ...


class StopWaiting(Exception):
    """The run was asked to stop while the learner waited for groups."""


class FromOtherProcesses:
    """Other processes sample."""

    def __init__(self, store: GroupStore, deadline_s: float, stop: StopRequest):
        self._store, self._deadline_s, self._stop = store, deadline_s, stop

    def wait(self, step: int, numbers: Sequence[int] | None = None) -> list[GroupRecord]:
        """As ``GroupSource.wait``; StopWaiting when the run is to stop."""
        begin = time.monotonic()

        def check() -> None:
            # A learner of several processes may only stop where all of them stop, which is after a
            # step.
            if self._stop.requested and jax.process_count() == 1:
                raise StopWaiting
            if time.monotonic() - begin > _SILENT_S:
                logging.log_every_n_seconds(
                    logging.WARNING,
                    "waiting for the groups of step %d; is an actor running?",
                    60,
                    step,
                )

        return self._store.wait(step, self._deadline_s, numbers, check)

    def take_stats(self) -> None:
        """None."""
        return None

    def __enter__(self) -> FromOtherProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class InLearnerThread:
    """The learner's thread samples while the learner waits."""

    def __init__(self, store: GroupStore, actor: Actor, deadline_s: float):
        self._store, self._actor, self._deadline_s = store, actor, deadline_s

    def wait(self, step: int, numbers: Sequence[int] | None = None) -> list[GroupRecord]:
        """As ``GroupSource.wait``. The deadline counts only while this process's actor has nothing
        to do, so for items that another process holds. While the actor works, the deadline of its
        tools applies.
        """
        wanted = None if numbers is None else set(numbers)
        worked = time.monotonic()
        while any(wanted is None or item.number in wanted for item in self._store.missing(step)):
            if self._actor.turn():
                worked = time.monotonic()
            elif time.monotonic() - worked > self._deadline_s:
                break
            else:
                time.sleep(0.01)
        return self._store.wait(step, 0.0, numbers)

    def take_stats(self) -> ActorStats:
        """As ``GroupSource.take_stats``."""
        return self._actor.take_stats()

    def __enter__(self) -> InLearnerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self._actor.close()


class InActorThread:
    """An actor in a thread of this process, on devices of its own or on the learner's."""

    def __init__(self, store: GroupStore, actor: Actor, deadline_s: float, stop: StopRequest):
        self._store, self._actor, self._deadline_s, self._asked = store, actor, deadline_s, stop
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="actor", daemon=True)

    def wait(self, step: int, numbers: Sequence[int] | None = None) -> list[GroupRecord]:
        """As ``GroupSource.wait``; StopWaiting when the run is to stop."""

        def check() -> None:
            if self._error is not None:
                raise self._error
            if self._asked.requested:
                raise StopWaiting

        return self._store.wait(step, self._deadline_s, numbers, check)

    def take_stats(self) -> ActorStats:
        """As ``GroupSource.take_stats``."""
        return self._actor.take_stats()

    def __enter__(self) -> InActorThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        # The thread looks at the event between two turns. A turn may wait for a tool, whose own
        # deadline is shorter than this one.
        self._thread.join(self._deadline_s)

    def _run(self) -> None:
        over: Callable[[], bool] = self._stop.is_set
        try:
            self._actor.run(over)
        except BaseException as error:
            # Whatever it is: a thread has nobody to raise it to, so it is raised where the learner
            # waits for groups that will not come.
            self._error = error
        finally:
            self._actor.close()
