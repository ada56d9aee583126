"""Items that a step lacks while the learner waits for it: which, who holds them, and for how long
that process has been silent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from rl_code.store import steps as steps_lib
from rl_code.store.errors import StoreError
from rl_code.store.heartbeat import Observer
from rl_code.store.processes import ProcessId
from rl_code.store.reader import RecordReader
from rl_code.store.steps import Item, Listing

NAMED = 20  # missing items that a message names


@dataclasses.dataclass(frozen=True)
class Missing:
    """An item without a group."""

    item: Item
    # who has claimed it last; None for nobody
    holder: ProcessId | None
    # for how many seconds the holder has been seen silent
    silent_s: float = 0.0
    # why the holder cannot be alive, or ""
    gone: str = ""

    def __str__(self) -> str:
        if self.holder is None:
            return f"{self.item} unclaimed"
        return f"{self.item} held by {self.holder}, " + (
            f"which {self.gone}" if self.gone else f"last seen {self.silent_s:.1f} s ago"
        )


class StoreTimeout(StoreError):
    """Groups did not arrive in time. missing: which, and who holds them."""

    def __init__(self, message: str, missing: Sequence[Missing]):
        super().__init__(message)
        self.missing = tuple(missing)


def holders(
    reader: RecordReader, step: int, listing: Listing | None = None
) -> dict[int, ProcessId | None]:
    """Holder of each item of a step by its latest claim; None for a damaged claim. listing: as for
    ``RecordReader.items``.
    """
    listing = listing or reader.planned(step)
    claimed = steps_lib.list_claims(reader.folder, step)
    of: dict[int, ProcessId | None] = {}  # by inode: the claims of a process have one
    found = {}
    for part in listing.parts:
        for block in steps_lib.blocks(reader.part(step, part)):
            first = block[0].number
            if first not in claimed:
                continue
            turn, inode = claimed[first]
            if inode not in of:
                path = steps_lib.claim_path(reader.folder, step, first, turn)
                of[inode] = steps_lib.read_claim(path)
            found |= {item.number: of[inode] for item in block}
    return found


def find(
    reader: RecordReader, listing: Listing, items: Sequence[Item], observer: Observer
) -> list[Missing]:
    """Descriptions of items of one step that have no group. observer: of their holders."""
    look = functools.cache(observer.look)
    who = holders(reader, items[0].step, listing)
    held = [(item, who.get(item.number)) for item in items]
    return [Missing(item, by, *(() if by is None else look(by))) for item, by in held]


def timed_out(
    step: int, missing: Sequence[Missing], wanted: int, deadline_s: float, folder: Path
) -> StoreTimeout:
    """The error of a wait. wanted: how many groups were waited for."""
    named = "; ".join(map(str, missing[:NAMED]))
    more = f"; and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return StoreTimeout(
        f"step {step} lacks {len(missing)} of {wanted} groups after {deadline_s:g} s in {folder}: "
        f"{named}{more}",
        missing,
    )
