"""Weights within one process: from the learner's devices and dtype to the actor's.

Arrays that do not change, as beside adapters, are moved once, and all kept versions share them.

Storage may stand behind. After a restart the actor may have to sample with a version from before
the learner's checkpoint, which is in nobody's memory any more.
"""

from __future__ import annotations

import dataclasses
import threading
import time

import jax

from models.transformer import Transformer
from rl_code.checkpoint import arrays
from rl_code.weights.layout import detached
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.versions import (
    TransferStats,
    Version,
    Wanted,
    WeightError,
    check,
    refuse_other,
)
from rl_code.weights.waiting import timed_out


class LocalWeights:
    """Publisher and subscriber in one. Any number of threads may wait. Errors name the thread.

    Args:
      abstract: the actor's model, leaves with shape, dtype and sharding
        (``layout.sampling_model``).
      keep: how many of the newest versions stay in the memory of the actor's devices.
      stored: both sides of storage, which has every version; None for none.
    """

    def __init__(
        self,
        abstract: Transformer,
        *,
        keep: int,
        stored: tuple[StoredPublisher, StoredSubscriber] | None = None,
    ):
        if keep < 1:
            raise ValueError(f"{keep=} must be at least 1")
        self._abstract = abstract
        self._targets = arrays.targets(abstract)
        self._keep = keep
        self._publisher, self._subscriber = stored or (None, None)
        self._changed = threading.Condition()
        self._kept: dict[int, tuple[Version, Transformer, float]] = {}
        self._closed = False
        self._moved: TransferStats | None = None
        self.fetched: TransferStats | None = None

    @property
    def published(self) -> TransferStats | None:
        """As ``Publisher.published``: of the newest version that is stored, and what the newest
        moved in memory.
        """
        stored = self._publisher and self._publisher.published
        if stored is None or self._moved is None:
            return self._moved
        return dataclasses.replace(
            stored, live_bytes=self._moved.live_bytes, live_s=self._moved.live_s
        )

    def publish(self, version: int, model: Transformer) -> Version:
        """As ``Publisher.publish``: the copy shares no memory with the model, which may be donated
        afterwards.
        """
        # Storage comes first: if it refuses the version (a known number with other bits), the actor
        # must not sample with it.
        if self._publisher is not None:
            self._publisher.publish(version, model)
        begin = time.perf_counter()
        wanted = self._abstract.config
        copies = detached(model, wanted.dtype, wanted.quantised)
        made = Version.of(version, copies)
        # The lock is not held while arrays move between devices, so that waiting threads can look
        # for other versions meanwhile.
        with self._changed:
            if known := self._kept.get(version):
                refuse_other(known[0], made, "this process")
                return made
            newest = self._kept.get(max(self._kept, default=version))
        names, there = list(copies), {}
        if newest is not None:
            names, there = made.differing(newest[0]), arrays.flatten(newest[1])
        new = {name: jax.device_put(copies[name], self._targets[name].sharding) for name in names}
        moved = {name: new[name] if name in new else there[name] for name in copies}
        check(made, moved, "the learner's devices")
        with self._changed:
            self._kept[version] = made, arrays.rebuild(self._abstract, moved), time.monotonic()
            self._kept = {
                number: self._kept[number] for number in sorted(self._kept)[-self._keep :]
            }
            seconds = time.perf_counter() - begin
            length = sum(x.nbytes for x in new.values())
            self._moved = TransferStats(
                "publish", version, seconds, live_bytes=length, live_s=seconds
            )
            self._changed.notify_all()
        return made

    def newest(self) -> int | None:
        """As ``Subscriber.newest``."""
        with self._changed:
            return max(self._kept, default=None)

    def kept(self) -> list[int]:
        """The versions that are there."""
        with self._changed:
            return list(self._kept)

    def wait(
        self, *, at_least: int | None = None, exactly: int | None = None, deadline_s: float
    ) -> tuple[int, Transformer]:
        """As ``Subscriber.wait``; WeightError also when the learner closes before the version
        comes. A version that memory lacks is read from storage.

        With storage a version that it lacks too is waited for without a deadline. A learner that
        repeats the steps since its checkpoint may take as long as they took the first time, and it
        closes this object when it ends.
        """
        wanted = Wanted(at_least, exactly)
        if self._subscriber is not None:
            if (
                wanted.choose(self.kept()) is None
                and wanted.choose(self._subscriber.announced()) is not None
            ):
                found = self._subscriber.wait(
                    at_least=at_least, exactly=exactly, deadline_s=deadline_s
                )
                self.fetched = self._subscriber.fetched
                return found
            deadline_s = threading.TIMEOUT_MAX
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed or wanted.choose(self._kept) is not None or wanted.gone(self._kept)
                ),
                deadline_s,
            )
            number = wanted.choose(self._kept)
            if number is not None:
                self.fetched = TransferStats("fetch", number)
                return number, self._kept[number][1]
            if wanted.gone(self._kept):
                raise WeightError(f"{wanted} is not kept any more; there are {sorted(self._kept)}")
            newest = max(self._kept, default=None)
            if self._closed:
                raise WeightError(
                    f"{wanted} will not come: the learner closed after version {newest}"
                )
            seen = None if newest is None else (newest, time.monotonic() - self._kept[newest][2])
            who = threading.current_thread().name
            raise timed_out(who, deadline_s, wanted, "the learner", seen, "this process")

    def close(self) -> None:
        """As ``Publisher.close``. No more versions will come; those that are here stay."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._publisher is not None:
            self._publisher.close()
