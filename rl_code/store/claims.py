"""How actors share the work: they claim planned items, and take over the items of lost actors.

A claim is a file that only one process can make. An actor is lost when its heartbeat has not
changed for a while, when it has left, or when it was started again: the new start knows nothing of
what the old one held. Another actor then makes the next claim on each of its items. The former
holder may still deliver; the first delivery counts, whoever makes it.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Callable, Iterator

from absl import logging

from rl_code.store import steps as steps_lib
from rl_code.store.errors import StoreError
from rl_code.store.heartbeat import Heartbeat, Observer
from rl_code.store.processes import ProcessId
from rl_code.store.sealed import seal
from rl_code.store.steps import Item, Listing
from rl_code.store.store import GroupStore


@dataclasses.dataclass(frozen=True)
class WorkConfig:
    """When a process counts as lost."""

    # Seconds between two changes of a process's heartbeat.
    heartbeat_s: float = 1.0
    # Seconds without a change of an actor's heartbeat after which other actors may take over its
    # items.
    heartbeat_timeout_s: float = 15.0
    # Seconds without progress of its main loop after which an actor stops its own heartbeat. It
    # must be longer than the longest compilation.
    stall_s: float = 300.0
    # Seconds that the learner waits for the groups of a step before it gives up.
    deadline_s: float = 1800.0

    def __post_init__(self):
        if not min(self.heartbeat_s, self.stall_s) > 0:
            raise ValueError(f"{self.heartbeat_s=} and {self.stall_s=} must be positive")
        if not self.heartbeat_timeout_s > 2 * self.heartbeat_s:
            raise ValueError(
                f"{self.heartbeat_timeout_s=} must be more than two beats of {self.heartbeat_s=}"
            )
        if not self.deadline_s > self.stall_s + self.heartbeat_timeout_s:
            raise ValueError(
                f"{self.deadline_s=} must be more than {self.stall_s=} and "
                f"{self.heartbeat_timeout_s=} together: "
                "the learner would give up before a lost actor can be replaced"
            )


class Claims:
    """An actor's claims on items. A context manager; leaving it gives up what is not delivered.

    store: a store that was opened with the actor's name.
    """

    def __init__(self, store: GroupStore, config: WorkConfig):
        self.claimed = 0  # items got so far
        self.takeovers = 0  # those of them that another actor had
        self._store = store
        self._identity = store.process.identity
        self._timeout_s = config.heartbeat_timeout_s
        self._observer = Observer(store.folder, longest_gap_s=config.heartbeat_timeout_s / 2)
        self._held: set[tuple[int, int]] = set()  # items that the caller knows it holds
        self._cursor: int | None = None  # every step before it is consumed
        self._heartbeat = Heartbeat(
            store.process, heartbeat_s=config.heartbeat_s, stall_s=config.stall_s
        )

    def claim(self, max_items: int) -> list[Item]:
        """Claims up to ``max_items`` items of the oldest step with items that can be had; [] if
        there is nothing to do.

        Counts as progress. Raises StoreError when the storage fails, or when this process has been
        replaced.
        """
        if max_items < 1:
            raise ValueError(f"{max_items=} must be at least 1")
        self.progress()
        lost = functools.cache(self._lost)  # one look at each holder
        for step, listing in self._open_steps():
            items = [
                item
                for item in self._store.items(step, listing)
                if item.number not in listing.groups
            ]
            # Each actor begins at a random item, so that several seldom try for the same one.
            start = random.randrange(len(items)) if items else 0
            taken: list[Item] = []
            for item in items[start:] + items[:start]:
                if self._take(item, listing, lost):
                    taken.append(item)
                if len(taken) == max_items:
                    break
            if taken:
                self.claimed += len(taken)
                self._held |= {(item.step, item.number) for item in taken}
                return sorted(taken, key=lambda item: item.number)
        return []

    def progress(self) -> None:
        """Says that the main loop is alive. Raises StoreError when another process runs under this
        one's name.
        """
        self._heartbeat.progress()

    def close(self) -> None:
        """Leaves: what this actor holds and has not delivered may be taken over at once."""
        self._heartbeat.close()

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_steps(self) -> Iterator[tuple[int, Listing]]:
        """Planned steps that are not consumed, oldest first."""
        if self._cursor is None:
            self._cursor = self._first_open()
        if self._cursor is None:
            return
        step = self._cursor
        while (listing := self._store.reader.listing(step)) is not None:
            if not listing.consumed:
                yield step, listing
            elif step == self._cursor:
                self._cursor += 1
                self._held = {held for held in self._held if held[0] >= self._cursor}
            step += 1

    def _first_open(self) -> int | None:
        """The step after the newest consumed one: steps are planned and consumed in order. None:
        nothing is planned.
        """
        first = None
        for step in reversed(self._store.reader.steps()):
            listing = self._store.reader.listing(step)
            if listing is not None and listing.consumed:
                return step + 1
            first = step
        return first

    def _take(self, item: Item, listing: Listing, lost: Callable[[ProcessId | None], str]) -> bool:
        """Tries to claim an item; whether that succeeded.

        lost: tells why a holder has lost its items, "" if it has not.
        """
        if item.number not in listing.claims:
            return self._publish(item, 0, None)
        holder = self._store.holder(item, listing)
        if holder == self._identity:
            # The claim is ours. If the caller does not know of it, an earlier call failed after it
            # had made this claim.
            return (item.step, item.number) not in self._held
        reason = lost(holder)
        if not reason or not self._publish(item, listing.claims[item.number] + 1, holder):
            return False
        self.takeovers += 1
        logging.warning(
            "%s takes item %s over from %s, which %s", self._identity, item, holder, reason
        )
        return True

    def _lost(self, holder: ProcessId | None) -> str:
        if holder is None:
            return "left a damaged claim"
        silent_s, gone = self._observer.look(holder)
        if gone or silent_s <= self._timeout_s:
            return gone
        return f"has had no heartbeat for {silent_s:.1f} s"

    def _publish(self, item: Item, turn: int, before: ProcessId | None) -> bool:
        content = {
            "actor": self._identity.name,
            "incarnation": self._identity.incarnation,
            "when": time.time(),
            "before": before and str(before),
        }
        # Not synced to the disk: a loss of power that destroys the claim ends its actor, too.
        path = steps_lib.claim_path(self._store.folder, item, turn)
        try:
            return self._store.process.publish(
                path, seal(content), f"the claim on item {item}", synced=False
            )
        except StoreError:
            # Since the folder was listed, others have delivered the item, and its step was consumed
            # and put into a shard.
            if self._store.reader.moved(item.step):
                return False
            raise
