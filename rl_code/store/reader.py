"""Reads the record of a run, wherever a step lies: in its folder or in a shard.

A step lies in its folder from its plan on. Some time after it was consumed it is put into a shard,
with others, and its folder is deleted. The shard gets its name in one step, and only then is the
folder moved away as a whole, before any of its files is deleted. A step is therefore whole in at
least one of the two places at every moment. Where both are there, the shard is read: it comes from
a process that was killed before it could delete the folder.

Of an open step the learner says for each part of its plan which deliveries it takes
(``collector``). Until then the first that a reader comes across is as good as any.

Old steps are removed where ``record.keep`` says so. What is removed is written down before it is
deleted, and reading it raises an error that says so.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_code.store import group_records, shards
from rl_code.store import steps as steps_lib
from rl_code.store.errors import StoreError, explain
from rl_code.store.group_logs import LogReader, OpenFiles, Place
from rl_code.store.group_records import GroupRecord
from rl_code.store.sealed import unseal
from rl_code.store.shards import Shard, ShardStep
from rl_code.store.steps import CONSUMED, Item, Listing

REMOVED = "removed.json"
_STEPS = 8  # whose places a reader remembers


@dataclasses.dataclass(frozen=True)
class Removed:
    """Parts of a record that ``record.keep`` has removed."""

    # the first step that is kept
    before: int
    # record.keep of the run that removed it
    keep: int

    def __str__(self) -> str:
        return (
            f"the steps before {self.before} were removed from the record: record.keep = "
            f"{self.keep} in the config of the run"
        )


class RecordReader:
    """A view of the record in the store's ``folder``. Every method raises StoreError when the
    storage fails or a file is damaged. Threads may share it, and it can be pickled.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).absolute()
        self._shards: dict[tuple[int, int], Path] = {}
        self._list = shards.ShardList(self.folder)
        self._places: dict[int, dict[int, Place]] = {}  # of groups that stay where they are
        # Parts of plans never change, nor what was taken for them, so both are read once.
        self._part = functools.lru_cache(maxsize=64)(self._read_part)
        self._taken = functools.lru_cache(maxsize=64)(self._read_taken)
        self._arrived = functools.lru_cache(maxsize=8)(self._follow)

    def __reduce__(self):
        return RecordReader, (self.folder,)

    def steps(self) -> list[int]:
        """The steps that are planned, in order."""
        # Folders first: a step that moves into a shard meanwhile is then seen twice, not missed.
        in_folders = steps_lib.steps(self.folder)
        self._look()
        # A fork may have steps of its parent beyond the name of a shard, which are not its own.
        in_shards = [
            step
            for (first, last), path in self._shards.items()
            for step in shards.open_shard(path).steps
            if first <= step <= last
        ]
        removed = self.removed()
        first = removed.before if removed else 0
        return sorted(step for step in {*in_folders, *in_shards} if step >= first)

    def listing(self, step: int) -> Listing | None:
        """Content of a step; None when it is not planned, or was removed."""
        if (found := self._in_shard(step)) is not None:
            return _listing(found[1])
        if (listing := steps_lib.list_step(self.folder, step)) is not None:
            return listing
        self._look()  # the step may have moved since
        return None if (found := self._in_shard(step)) is None else _listing(found[1])

    def planned(self, step: int) -> Listing:
        """As ``listing``; StoreError, which says why, when there is no plan."""
        listing = self.listing(step)
        if listing is None or not listing.parts:
            raise StoreError(f"step {step} is not planned in {self.folder}{self.reason(step)}")
        return listing

    def part(self, step: int, first: int) -> tuple[Item, ...]:
        """The items of one part of a step's plan."""
        return self._part(step, first)

    def items(self, step: int, listing: Listing | None = None) -> list[Item]:
        """Items planned for a step so far. listing: of the step, when the caller has just made
        it.
        """
        listing = listing or self.planned(step)
        return [item for first in listing.parts for item in self._part(step, first)]

    def groups(self, step: int, listing: Listing | None = None) -> frozenset[int]:
        """The items of a step that have a group. listing: as for ``items``."""

        def in_folder() -> set[int]:
            names = listing or self.planned(step)
            numbers: set[int] = set()
            for first in names.taken:
                numbers.update(self._taken(step, first))
            if not names.taken.issuperset(names.parts):
                numbers.update(self._arrived(step).look())
            return numbers

        return frozenset(self._wherever(step, in_folder, lambda entry: entry.groups))

    def claims(self, step: int, listing: Listing | None = None) -> dict[int, int]:
        """Number of times that each item of a step was claimed before its latest claim; not those
        that nobody has claimed. listing: as for ``items``.
        """

        def in_folder() -> dict[int, int]:
            names = listing or self.planned(step)
            turns: dict[int, int] = {}
            claimed = steps_lib.list_claims(self.folder, step)
            for first in names.parts:
                for block in steps_lib.blocks(self.part(step, first)):
                    if block[0].number in claimed:
                        turns |= {item.number: claimed[block[0].number][0] for item in block}
            return turns

        return dict(self._wherever(step, in_folder, lambda entry: entry.claims))

    def group_file(
        self, step: int, number: int, files: OpenFiles | None = None
    ) -> tuple[bytes, object]:
        """A group as it was delivered, and where it was read. files: which stay open for the next
        groups.
        """
        if (found := self._in_shard(step)) is not None:
            return _group(found, step, number)
        try:
            place = self._place(step, number)
            return self.read_place(step, place, files), place
        except StoreError:
            # Whatever it is: the client of a network drive has several words for a file that
            # another host has deleted.
            self._look()
            if (found := self._in_shard(step)) is None:
                raise
            return _group(found, step, number)

    def read_place(self, step: int, place: Place, files: OpenFiles | None = None) -> bytes:
        """The bytes of a group in the folder of a step. files: as for ``group_file``."""
        try:
            return place.read() if files is None else files.read(place)
        except OSError:
            with explain(f"read the group{self.reason(step)}", place.path):
                raise

    def group(self, step: int, number: int) -> GroupRecord:
        """Record delivered for an item, verified."""
        data, place = self.group_file(step, number)
        record = group_records.decode(data, place)
        if (record.step, record.number) != (step, number):
            raise StoreError(f"{place} holds the group of item ({record.step}, {record.number})")
        return record

    def consumption(self, step: int) -> dict[str, Any]:
        """Record that the learner wrote when it consumed a step: version, weights, digests (of the
        groups, in order), by and when.
        """
        data, path = self._small_file(step, CONSUMED)
        return unseal(data, path)

    def removed(self) -> Removed | None:
        """Parts that ``record.keep`` has removed; None when all is there."""
        path = self.folder / shards.SHARDS / REMOVED
        with explain("read", path):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return None
        return Removed(**unseal(data, path))

    def reason(self, step: int) -> str:
        """Reason why a step was removed (``record.keep``), in parentheses; "" where it was not."""
        removed = self.removed()
        return f" ({removed})" if removed and step < removed.before else ""

    def moved(self, step: int) -> bool:
        """True if a step has left its folder for good: it is in a shard, or was removed."""
        self._look()
        return self._in_shard(step) is not None or bool(self.reason(step))

    # --- Places -----------------------------------------------------------------------------------

    def _wherever[T](
        self, step: int, in_folder: Callable[[], T], in_shard: Callable[[ShardStep], T]
    ) -> T:
        """Something of a step, from its folder or from its shard."""
        if (found := self._in_shard(step)) is None:
            failed = None
            try:
                result = in_folder()
            except StoreError as error:
                failed = error
            # A folder is moved away before its files are deleted. One that is still there was
            # whole.
            if failed is None and steps_lib.step_folder(self.folder, step).is_dir():
                return result
            self._look()
            if (found := self._in_shard(step)) is None:
                raise failed or StoreError(f"step {step} has gone from {self.folder}")
        return in_shard(found[1])

    def _place(self, step: int, number: int) -> Place:
        """Place of the group of an item in the folder of its step."""
        known = self._places.get(step, {})
        if number not in known:
            listing = self.planned(step)
            known = {}
            for first in listing.taken:
                known |= self._taken(step, first)
            self._places[step] = known
            if len(self._places) > _STEPS:
                self._places.pop(next(iter(self._places)), None)
            if number not in known:
                known = self._arrived(step).look()
        if number not in known:
            for error in self._arrived(step).damaged:  # the item's, or as bad
                raise error
            raise StoreError(
                f"item ({step}, {number}) has no group in {self.folder}{self.reason(step)}"
            )
        return known[number]

    def _read_taken(self, step: int, first: int) -> dict[int, Place]:
        data, path = self._small_file(step, steps_lib.taken_path(self.folder, step, first).name)
        return steps_lib.parse_taken(data, path, self.folder, step, first)

    def _follow(self, step: int) -> _Arrived:
        return _Arrived(steps_lib.groups_folder(self.folder, step))

    def _look(self) -> None:
        self._shards = self._list.look()

    def _in_shard(self, step: int) -> tuple[Shard, ShardStep] | None:
        """The shard that has a step, among those that were seen."""
        for path in self._paths(step):
            shard = shards.open_shard(path)
            if step in shard.steps:
                return shard, shard.steps[step]
        return None

    def _paths(self, step: int) -> list[Path]:
        """The shards that may have a step."""
        found = _of_step(self._shards, step)
        if all(path.exists() for path in found):
            return found
        self._look()  # ``record.keep`` has removed one
        return _of_step(self._shards, step)

    def _small_file(self, step: int, name: str) -> tuple[bytes, Path]:
        """A part of the plan, or the consumption, and where it was read."""
        path = steps_lib.step_folder(self.folder, step) / name
        if (found := self._in_shard(step)) is None:
            try:
                return path.read_bytes(), path
            except OSError:
                # Whatever it is: the client of a network drive has several words for a file that
                # another host has deleted.
                self._look()
                if (found := self._in_shard(step)) is None:
                    action = "read the plan" if name != CONSUMED else "read"
                    with explain(action + self.reason(step), path):
                        raise
        shard, entry = found
        if name not in entry.files:
            raise StoreError(f"step {step} has no {name} in {shard.path}")
        return entry.files[name], shard.path

    def _read_part(self, step: int, first: int) -> tuple[Item, ...]:
        data, path = self._small_file(step, steps_lib.part_path(self.folder, step, first).name)
        return steps_lib.parse_part(data, path)


class _Arrived:
    """Groups that have arrived for an open step, by the first delivery seen of each item."""

    def __init__(self, folder: Path):
        self.damaged: list[StoreError] = []
        self._places: dict[int, Place] = {}
        self._logs = LogReader(folder)
        self._lock = threading.Lock()

    def look(self) -> dict[int, Place]:
        """The places of the items' groups."""
        with self._lock:
            for place, data in self._logs.look():
                try:
                    self._places.setdefault(group_records.address(data, place)[1], place)
                except StoreError as error:
                    self.damaged.append(error)
            return dict(self._places)


def _of_step(found: Mapping[tuple[int, int], Path], step: int) -> list[Path]:
    return [path for (first, last), path in found.items() if first <= step <= last]


def _listing(entry: ShardStep) -> Listing:
    listing = steps_lib.list_names(entry.files)
    return dataclasses.replace(listing, taken=frozenset(listing.parts))


def _group(found: tuple[Shard, ShardStep], step: int, number: int) -> tuple[bytes, Path]:
    shard, entry = found
    if number not in entry.groups:
        raise StoreError(f"item ({step}, {number}) has no group in {shard.path}")
    return shard.group(step, number), shard.path
