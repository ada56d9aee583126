"""Weights within one process, with storage behind.

Storage is needed after a restart: the actor may have to sample with a version from before the
learner's checkpoint, which is in nobody's memory any more.
"""

from __future__ import annotations

import dataclasses
import threading

from models.transformer import Transformer
from rl_code.weights.local import LocalWeights
from rl_code.weights.stored_publisher import StoredPublisher
from rl_code.weights.stored_subscriber import StoredSubscriber
from rl_code.weights.versions import TransferStats, Version, Wanted


class LocalAndStoredWeights:
    """Publisher and subscriber in one: versions stay in memory as ``LocalWeights`` keeps them, and
    all are stored.
    """

    def __init__(
        self, local: LocalWeights, publisher: StoredPublisher, subscriber: StoredSubscriber
    ):
        self._local, self._publisher, self._subscriber = local, publisher, subscriber
        self.fetched: TransferStats | None = None

    @property
    def published(self) -> TransferStats | None:
        """As ``Publisher.published``: of the newest version that is stored, and what the newest
        moved in memory.
        """
        stored = self._publisher.published
        live = self._local.published
        if stored is None:
            return live
        return dataclasses.replace(stored, live_bytes=live.live_bytes, live_s=live.live_s)

    def publish(self, version: int, model: Transformer) -> Version:
        """As ``Publisher.publish``."""
        # Storage comes first: if it refuses the version (a known number with other bits), the actor
        # must not sample with it.
        self._publisher.publish(version, model)
        return self._local.publish(version, model)

    def newest(self) -> int | None:
        """As ``Subscriber.newest``."""
        return self._local.newest()

    def wait(
        self, *, at_least: int | None = None, exactly: int | None = None, deadline_s: float
    ) -> tuple[int, Transformer]:
        """As ``Subscriber.wait``. A version that memory lacks is read from storage. If storage
        lacks it too, this waits until it is in memory.

        The wait in memory has no deadline. A learner that repeats the steps since its checkpoint
        may take as long as they took the first time, and it closes this object when it ends.
        """
        wanted = Wanted(at_least, exactly)
        source = self._local
        if (
            wanted.choose(source.kept()) is None
            and wanted.choose(self._subscriber.announced()) is not None
        ):
            source = self._subscriber
        else:
            deadline_s = threading.TIMEOUT_MAX
        found = source.wait(at_least=at_least, exactly=exactly, deadline_s=deadline_s)
        self.fetched = source.fetched
        return found

    def close(self) -> None:
        """As ``Publisher.close``."""
        self._local.close()
        self._publisher.close()
