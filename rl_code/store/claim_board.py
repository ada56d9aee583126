"""Knowledge of one actor about the claims on one step, and the making of its own.

The folder of claims is listed when the actor meets a step and whenever it was wrong: it tried a
block that somebody else had claimed since. So a claim is one link(2) most of the time.

When nothing is free, the actor looks at the heartbeats of a few holders each time it asks, one
after another. An idle actor thus costs the same however many actors there are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from absl import logging

from rl_code.store import group_records
from rl_code.store import steps as steps_lib
from rl_code.store.errors import StoreError
from rl_code.store.group_logs import LogReader
from rl_code.store.processes import ProcessId
from rl_code.store.steps import Item, Listing
from rl_code.store.store import GroupStore

# Holders whose heartbeats are looked at in one call.
_LOOKS = 4


class Board:
    """The blocks of a step. A block is named by the number of its first item.

    refresh_s: seconds after which the claims are listed again, also if nothing shows that they
    changed.
    """

    def __init__(self, store: GroupStore, step: int, refresh_s: float):
        self.takeovers = 0  # items that another actor had
        self._store, self._step, self._refresh_s = store, step, refresh_s
        self._identity = store.process.identity
        self._parts: set[int] = set()  # of the plan that are cut into blocks
        # The items of the blocks that may have something left to do.
        self._blocks: dict[int, Sequence[Item]] = {}
        self._claims: dict[int, tuple[int, int]] = {}  # as ``steps.list_claims``
        self._listed = 0.0
        self._holders: dict[int, ProcessId | None] = {}  # by inode of their claims
        self._handed_out: dict[int, int] = {}  # block -> turn of the claim the caller knows of
        self._next = random.randrange(1 << 16)  # holder to look at
        self._logs = LogReader(steps_lib.groups_folder(store.folder, step))
        self._delivered: dict[ProcessId, set[int]] = {}  # items, by actors that were lost

    def take(
        self, listing: Listing, max_items: int, lost: Callable[[ProcessId | None], str]
    ) -> list[Item]:
        """Claims blocks until they have ``max_items`` items or more, or none is left.

        listing: of the step, as it is now. lost: tells why a holder has lost its items, "" if it
        has not. Raises StoreError; what was claimed by then is handed out by the next call.
        """
        self._update(listing)
        taken: dict[int, tuple[int, Sequence[Item]]] = {}  # block -> turn and items
        self._take_free(taken, max_items)
        if _count(taken) < max_items:
            self._take_lost(taken, max_items, lost)
        for first, (turn, _) in taken.items():
            self._handed_out[first] = turn
            self._claims[first] = max((turn, 0), self._claims.get(first, (turn, 0)))
        return [item for _, items in taken.values() for item in items]

    def _update(self, listing: Listing) -> None:
        """Adds the blocks of new parts of the plan, and leaves out what is done."""
        if not self._parts and listing.parts:
            self._list()
        for part in listing.parts:
            if part not in self._parts:
                self._parts.add(part)
                for block in steps_lib.blocks(self._store.reader.part(self._step, part)):
                    self._blocks[block[0].number] = block
        for part in listing.taken & self._parts:
            for block in steps_lib.blocks(self._store.reader.part(self._step, part)):
                self._blocks.pop(block[0].number, None)

    def _take_free(self, taken: dict[int, tuple[int, Sequence[Item]]], max_items: int) -> None:
        free = [first for first in self._blocks if first not in self._claims]
        # Each actor begins at a random block, so that several seldom try for the same one.
        start = random.randrange(len(free)) if free else 0
        for first in free[start:] + free[:start]:
            if _count(taken) >= max_items:
                return
            if first in self._claims:  # as was seen when another block was gone
                continue
            if self._claim(first, 0):
                taken[first] = 0, self._blocks[first]
            else:
                self._list()

    def _take_lost(
        self,
        taken: dict[int, tuple[int, Sequence[Item]]],
        max_items: int,
        lost: Callable[[ProcessId | None], str],
    ) -> None:
        """Takes what holders have lost, and what an earlier call claimed before it failed."""
        if time.monotonic() > self._listed + self._refresh_s:
            self._list()
        held: dict[int, list[int]] = {}  # inode -> blocks
        for first in self._blocks:
            if first in taken or first not in self._claims:
                continue
            turn, inode = self._claims[first]
            if self._handed_out.get(first) != turn:
                held.setdefault(inode, []).append(first)
        inodes = sorted(held)
        begin = self._next % max(1, len(inodes))
        self._next += _LOOKS
        for inode in (inodes[begin:] + inodes[:begin])[:_LOOKS]:
            if inode not in self._holders:
                self._holders[inode] = self._holder(held[inode][0])
            holder = self._holders[inode]
            ours = holder == self._identity
            reason = "" if ours else lost(holder)
            for first in held[inode]:
                if _count(taken) >= max_items:
                    return
                if first not in self._claims:  # somebody has deleted the claims since
                    continue
                if ours:
                    taken[first] = self._claims[first][0], self._blocks[first]
                elif reason:
                    self._take_over(first, holder, reason, taken)

    def _take_over(
        self,
        first: int,
        holder: ProcessId | None,
        reason: str,
        taken: dict[int, tuple[int, Sequence[Item]]],
    ) -> None:
        turn = self._claims[first][0]
        # An inode says whose claim it is, unless the file system gives wrong ones in its listings.
        if self._holder(first) != holder:
            self._list()
            self._holders.clear()
            return
        left = self._undelivered(first, turn)
        if not left:
            del self._blocks[first]
        elif self._claim(first, turn + 1):
            taken[first] = turn + 1, left
            self.takeovers += len(left)
            for item in left:
                logging.warning(
                    "%s takes item %s over from %s, which %s", self._identity, item, holder, reason
                )
        else:
            self._list()

    def _undelivered(self, first: int, turn: int) -> list[Item]:
        """The items of a block that none of its holders delivered."""
        done: set[int] = set()
        for earlier in range(turn + 1):
            path = steps_lib.claim_path(self._store.folder, self._step, first, earlier)
            if (who := steps_lib.read_claim(path)) is not None:
                done |= self._delivered_by(who)
        return [item for item in self._blocks[first] if item.number not in done]

    def _delivered_by(self, who: ProcessId) -> set[int]:
        found = self._delivered.setdefault(who, set())
        for place, data in self._logs.look(who):
            try:
                found.add(group_records.address(data, place)[1])
            except StoreError as error:
                logging.warning("%s", error)
        return found

    def _holder(self, first: int) -> ProcessId | None:
        turn = self._claims[first][0]
        path = steps_lib.claim_path(self._store.folder, self._step, first, turn)
        return steps_lib.read_claim(path)

    def _list(self) -> None:
        self._claims = steps_lib.list_claims(self._store.folder, self._step)
        self._listed = time.monotonic()

    def _claim(self, first: int, turn: int) -> bool:
        # Not synced to the disk: a loss of power that destroys the claim ends its actor, too.
        path = steps_lib.claim_path(self._store.folder, self._step, first, turn)
        what = f"the claim on item ({self._step}, {first})"
        try:
            return self._store.process.claim(path, what)
        except StoreError:
            # Since the folder was listed, others have delivered the items, and their step was
            # consumed and put into a shard.
            if self._store.reader.moved(self._step):
                return False
            raise


def _count(taken: dict[int, tuple[int, Sequence[Item]]]) -> int:
    return sum(len(items) for _, items in taken.values())
