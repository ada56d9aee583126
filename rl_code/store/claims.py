"""Sharing of the work among actors: they claim planned items, and take over the items of lost
actors.

A claim is a file that only one process can make, on one item or, where a step has thousands, on a
block of some (``steps.blocks``). An actor is lost when its heartbeat has not
changed for a while, when it has left, or when it was started again: the new start knows nothing of
what the old one held. Another actor then makes the next claim on each of its items. The former
holder may still deliver; the first delivery counts, whoever makes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from rl_code.store import shards
from rl_code.store import steps as steps_lib
from rl_code.store.claim_board import Board
from rl_code.store.heartbeat import Heartbeat, Observer
from rl_code.store.processes import ProcessId
from rl_code.store.steps import Item, Listing
from rl_code.store.store import GroupStore


@dataclasses.dataclass(frozen=True)
class WorkConfig:
    """Rules by which a process counts as lost."""

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
        self._timeout_s = config.heartbeat_timeout_s
        self._observer = Observer(store.folder, longest_gap_s=config.heartbeat_timeout_s / 2)
        self._boards: dict[int, Board] = {}  # by step
        self._cursor: int | None = None  # every step before it is consumed
        self._heartbeat = Heartbeat(
            store.process, heartbeat_s=config.heartbeat_s, stall_s=config.stall_s
        )

    def claim(self, max_items: int) -> list[Item]:
        """Claims up to ``max_items`` items of the oldest step with items that can be had; [] if
        there is nothing to do. Of a step of thousands of items, the last block may bring more.

        Counts as progress. Raises StoreError when the storage fails, or when this process has been
        replaced.
        """
        if max_items < 1:
            raise ValueError(f"{max_items=} must be at least 1")
        self.progress()
        lost = functools.cache(self._lost)  # one look at each holder
        for step, listing in self._open_steps():
            if step not in self._boards:
                self._boards[step] = Board(self._store, step, self._timeout_s / 2)
            board = self._boards[step]
            before = board.takeovers
            taken = board.take(listing, max_items, lost)
            self.takeovers += board.takeovers - before
            if taken:
                self.claimed += len(taken)
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
                self._boards.pop(step, None)
            step += 1

    def _first_open(self) -> int | None:
        """The step after the newest consumed one: steps are planned and consumed in order. None:
        nothing is planned.
        """
        # What is in shards is consumed, and their names say which steps that are. None is opened.
        moved = [last for _, last in shards.list_shards(self._store.folder)]
        first = max(moved) + 1 if moved else None
        for step in reversed(steps_lib.steps(self._store.folder)):
            listing = self._store.reader.listing(step)
            if listing is not None and listing.consumed:
                return max(step + 1, first or 0)
            first = step
        return first

    def _lost(self, holder: ProcessId | None) -> str:
        if holder is None:
            return "left a damaged claim"
        silent_s, gone = self._observer.look(holder)
        if gone or silent_s <= self._timeout_s:
            return gone
        return f"has had no heartbeat for {silent_s:.1f} s"
