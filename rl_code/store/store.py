"""The groups that actors sample and a learner trains on, in a folder that they share.

Step s consumes exactly the groups (s, 0), (s, 1), ... of its plan. The learner plans, waits, trains
and marks the step consumed; actors claim items (``claims.Claims``) and deliver groups. Any of these
processes may be killed at any moment:

- A plan, what was taken and a consumption are each one link(2): each has happened, or it has not.
  A group is delivered when all of it is on the disk.
- Of several deliveries of an item the learner takes one, and writes down which before it uses it
  (``collector``). So a learner that consumes a step again gets the same groups.
- To consume a step, the learner writes down the digests of its groups. If it consumes the step
  again, the digests must be the same.

What is planned, delivered and consumed is read through ``reader``, since consumed steps move into
shards (``compaction``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_code.host import files
from rl_code.store import group_records
from rl_code.store import missing as missing_lib
from rl_code.store import steps as steps_lib
from rl_code.store.collector import Collector
from rl_code.store.errors import ConsumedOtherwise, StoreError, explain
from rl_code.store.group_logs import GroupLog
from rl_code.store.group_records import GroupRecord
from rl_code.store.heartbeat import Observer
from rl_code.store.missing import NAMED
from rl_code.store.processes import StoreProcess
from rl_code.store.reader import RecordReader
from rl_code.store.sealed import seal
from rl_code.store.source import read_ahead
from rl_code.store.steps import Item, Listing
from rl_code.types import Group

_POLL_S, _LONGEST_POLL_S = 0.05, 2.0  # between two looks for groups
# Seconds between two looks at the heartbeats of those who are waited for, at least; and how many
# looks there are until the deadline, at most.
_LOOK_S, _LOOKS = 0.5, 60
_COLLECTED, _DELIVERED = 8, 3  # steps whose groups are collected, or delivered, at once


class GroupStore:
    """A process's view of the store in ``folder``.

    name: the name of this process among those that write (``processes.StoreProcess``). The store is
      made if there is none. None opens an existing store for reading.
    The attribute ``late`` counts groups that this process delivered for steps that were gone by
    then.
    Every method raises StoreError when the storage fails or a file is damaged.
    """

    def __init__(self, folder: str | Path, name: str | None = None):
        self.folder = Path(folder).absolute()
        self.late = 0
        self._process: StoreProcess | None = None
        if name is not None:
            # The parent must be there: a folder made where storage is not mounted would be shared
            # with nobody.
            for made in (self.folder, self.folder / steps_lib.STEPS, self.folder / "processes"):
                with explain("make the store's folder", made):
                    made.mkdir(exist_ok=True)
            self._process = StoreProcess(self.folder, name)
        steps_lib.steps(self.folder)
        self.reader = RecordReader(self.folder)
        self._collectors: dict[int, Collector] = {}  # by step
        self._logs: dict[int, GroupLog] = {}  # by step

    @property
    def process(self) -> StoreProcess:
        """This process as the store knows it; ValueError for a store opened for reading."""
        if self._process is None:
            raise ValueError(f"{self.folder} was opened without a name, for reading")
        return self._process

    @property
    def writes(self) -> bool:
        """True if it was opened with a name."""
        return self._process is not None

    # --- For the learner --------------------------------------------------------------------------

    def plan(self, items: Sequence[Item]) -> bool:
        """Writes what a step samples; returns False when that was written before.

        A step may be planned in several parts, each going on where the one before ended. Steps are
        planned in order. Raises StoreError when another plan stands there, naming the differences.
        """
        steps_lib.check_plan(items)
        step = items[0].step
        first = items[0].number
        listing = self.reader.listing(step)
        if listing is None:
            self._check_next(step)
            # The folder's names are on the disk before the plan is written into it.
            folder = steps_lib.make_folder(self.folder, step)
            with explain("make the folder of a step", folder):
                files.sync(folder)
                files.sync(folder.parent)
            listing = Listing()
        elif not listing.consumed:  # one that a killed learner began
            steps_lib.make_folder(self.folder, step)
        path = steps_lib.part_path(self.folder, step, first)
        if first not in listing.parts:
            if listing.consumed:
                raise StoreError(
                    f"step {step} is consumed; items from {items[0]} on cannot be added in "
                    f"{steps_lib.step_folder(self.folder, step)}"
                )
            if first != len(self.items(step, listing)):
                raise ValueError(
                    f"the plan of step {step} has {len(self.items(step, listing))} items, not "
                    f"{first}"
                )
            if self.process.publish(path, steps_lib.part_bytes(items), f"the plan of step {step}"):
                return True
        if found := steps_lib.differences(self.reader.part(step, first), items):
            raise StoreError(
                f"another plan of step {step} stands in {self.folder}: {'; '.join(found[:NAMED])}"
            )
        return False

    def await_plan(self, items: Sequence[Item], deadline_s: float) -> None:
        """Returns when another process has written this plan; StoreError after ``deadline_s``, or
        if it is another.
        """
        step = items[0].step
        first = items[0].number
        deadline = time.monotonic() + deadline_s
        while (listing := self.reader.listing(step)) is None or first not in listing.parts:
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"nobody planned item {items[0]} within {deadline_s:g} s, in {self.folder}"
                )
            time.sleep(_POLL_S)
        if found := steps_lib.differences(self.reader.part(step, first), items):
            raise StoreError(
                f"another plan of step {step} stands in {self.folder}: {'; '.join(found[:NAMED])}"
            )

    def wait(
        self,
        step: int,
        deadline_s: float,
        numbers: Sequence[int] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[GroupRecord]:
        """The groups of a planned step, or of some of its ``numbers``, in order, as soon as all are
        there.

        check: called before every look; what it raises ends the wait.
        Raises StoreTimeout after ``deadline_s`` seconds; it says what is missing, who holds it, and
        for how long that process has been silent.
        """
        deadline = time.monotonic() + deadline_s
        observer = Observer(self.folder)
        look_s = max(_LOOK_S, deadline_s / _LOOKS)
        next_look = -math.inf
        while True:
            check()
            begin = time.monotonic()
            listing = self.reader.planned(step)
            items = self.items(step, listing)
            if numbers is not None and not set(numbers) <= set(range(len(items))):
                raise ValueError(f"{numbers=} of step {step} must be in [0, {len(items)})")
            wanted = items if numbers is None else [items[number] for number in numbers]
            collector = self._collect(step, listing)
            left = [item for item in wanted if item.number not in collector.records]
            if not left:
                return [collector.records[item.number] for item in wanted]
            now = time.monotonic()
            if now >= next_look or now >= deadline:
                missing = missing_lib.find(self.reader, listing, left, observer)
                next_look = now + look_s
            if now >= deadline:
                collector.refuse_damage()
                raise missing_lib.timed_out(step, missing, len(wanted), deadline_s, self.folder)
            # Slow storage, or much of it, is looked at less often: for a quarter of the time.
            pause = min(max(_POLL_S, 3 * (now - begin)), _LONGEST_POLL_S)
            time.sleep(min(pause, deadline - now))

    def consume(
        self,
        step: int,
        groups: Sequence[GroupRecord],
        *,
        version: int,
        weights: str | None = None,
        batch: int | None = None,
    ) -> bool:
        """Marks a step consumed; returns False if it already was, with the same groups.

        Args:
          groups: the groups of all items of the plan, in order.
          version: the version of the learner's weights before the step.
          weights: a checksum of the weights after it.
          batch: a checksum of the batch that was made of the groups.

        Raises StoreError when the step was consumed with other groups or weights, or when the step
        before it is not consumed.
        """
        listing = self.reader.planned(step)
        planned = [(item.step, item.number) for item in self.items(step, listing)]
        if [(record.step, record.number) for record in groups] != planned:
            raise ValueError(
                f"step {step} consists of {planned}, not {[(r.step, r.number) for r in groups]}"
            )
        before = self.reader.listing(step - 1)
        if before is not None and not before.consumed:
            raise StoreError(
                f"step {step} cannot be consumed before step {step - 1}, in {self.folder}"
            )
        if not listing.consumed:
            self._refuse_others(step, listing, groups)
        content = {
            "version": version,
            "weights": weights,
            "digests": [record.digest for record in groups],
        }
        trajectories = [t for record in groups for t in record.group.all]
        by = {
            "batch": batch,
            "by": str(self.process.identity),
            "when": time.time(),
            "tokens": sum(len(t.tokens) for t in trajectories),
            "sampled": sum(int(t.own_sampled.sum()) for t in trajectories),
        }
        path = steps_lib.step_folder(self.folder, step) / steps_lib.CONSUMED
        what = f"the consumption of step {step}"
        self._collectors = {at: kept for at, kept in self._collectors.items() if at > step}
        # A step that was consumed before may be in a shard by now and have no folder.
        if not listing.consumed and self.process.publish(path, seal(content | by), what):
            return True
        there = self.consumption(step)
        changed = [
            f"{k} = {there[k]} there, {content[k]} here"
            for k in ("version", "weights")
            if there[k] != content[k]
        ]
        if there["digests"] != content["digests"]:
            pairs = zip(there["digests"], content["digests"], strict=False)
            changed.append(
                f"groups {[number for number, (a, b) in enumerate(pairs) if a != b]} are others"
            )
        if changed:
            raise ConsumedOtherwise(
                f"step {step} was consumed otherwise by {there['by']}, in {self.folder}: "
                f"{'; '.join(changed)}"
            )
        return False

    # --- For actors -------------------------------------------------------------------------------

    def deliver(self, item: Item, group: Group) -> bool:
        """Hands in the group of an item; returns False, and drops it, when its step is gone: it was
        consumed long ago, with a group that another actor delivered.

        Raises ValueError for a group that does not answer the item, TypeError for a value that
        cannot be recorded.
        """
        if problem := item.mismatch(group):
            raise ValueError(f"this is no group of item {item}: {problem}")
        data = group_records.encode(
            item.step, item.number, self.process.identity, time.time(), group
        )
        folder = steps_lib.groups_folder(self.folder, item.step)
        try:
            with explain(f"write the group of item {item} to", folder):
                self._log(item.step).append(data)
            return True
        except StoreError:
            if not self.reader.moved(item.step):
                raise
        self.late += 1
        return False

    # --- For everyone -----------------------------------------------------------------------------

    def items(self, step: int, listing: Listing | None = None) -> list[Item]:
        """Items planned for a step so far. listing: of its folder, when the caller has just made
        it.
        """
        return self.reader.items(step, listing)

    def missing(self, step: int) -> list[Item]:
        """The items of a step that have no group yet."""
        listing = self.reader.planned(step)
        if self.writes:
            there = self._collect(step, listing).records.keys()
        else:
            there = self.reader.groups(step, listing)
        return [item for item in self.items(step, listing) if item.number not in there]

    def record(self, step: int, number: int) -> GroupRecord:
        """Record delivered for an item, verified."""
        return self.reader.group(step, number)

    def read(self, step: int) -> list[GroupRecord]:
        """All groups of a step. Raises StoreError naming the items that are missing."""
        if missing := self.missing(step):
            if self.writes:
                self._collectors[step].refuse_damage()
            raise StoreError(
                f"step {step} lacks {', '.join(map(str, missing[:NAMED]))} in {self.folder}"
            )
        items = self.items(step)
        if self.writes:
            return [self._collectors[step].records[item.number] for item in items]
        return list(read_ahead(self.folder, [(step, item.number) for item in items]))

    def takeovers(self, step: int) -> int:
        """Number of times that an item of a step was taken over from an actor that was lost."""
        return sum(self.reader.claims(step).values())

    def consumed(self) -> list[int]:
        """The steps that are consumed, in order."""
        listings = ((step, self.reader.listing(step)) for step in self.reader.steps())
        return [step for step, listing in listings if listing is not None and listing.consumed]

    def places(self, steps: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """(step, number) of the groups of consumed steps, in the order in which they were used.

        steps: which steps; None for all. Raises StoreError for a step that is not consumed.
        """
        steps = self.consumed() if steps is None else steps
        return [
            (step, number)
            for step in steps
            for number in range(len(self.consumption(step)["digests"]))
        ]

    def is_consumed(self, step: int) -> bool:
        """True if a step is planned and consumed."""
        listing = self.reader.listing(step)
        return listing is not None and listing.consumed

    def consumption(self, step: int) -> dict[str, Any]:
        """Record that ``consume`` wrote: version, weights, digests (of the groups, in order), by
        and when.
        """
        return self.reader.consumption(step)

    def _check_next(self, step: int) -> None:
        if self.reader.listing(step - 1) is not None:
            return
        if planned := self.reader.steps():
            raise StoreError(
                f"step {step} cannot be planned after steps {planned[0]} to {planned[-1]}, in "
                f"{self.folder}{self.reader.reason(step)}"
            )

    def _collect(self, step: int, listing: Listing) -> Collector:
        """Groups that have arrived for a step by now."""
        if step not in self._collectors:
            process = self._process if self.writes else None
            self._collectors[step] = Collector(self.reader, step, process)
            if len(self._collectors) > _COLLECTED:
                del self._collectors[next(iter(self._collectors))]
        self._collectors[step].look(listing)
        return self._collectors[step]

    def _refuse_others(self, step: int, listing: Listing, groups: Sequence[GroupRecord]) -> None:
        """Raises StoreError unless these are the groups that were taken for a step."""
        taken = self._collect(step, listing).records
        others = [
            record.number
            for record in groups
            if record.number not in taken or taken[record.number].digest != record.digest
        ]
        if others:
            raise StoreError(f"step {step}: groups {others} are others than in {self.folder}")

    def _log(self, step: int) -> GroupLog:
        """Place where this process puts the groups of a step."""
        if step not in self._logs:
            folder = steps_lib.groups_folder(self.folder, step)
            self._logs[step] = GroupLog(folder, self.process.identity)
            if len(self._logs) > _DELIVERED:
                self._logs.pop(next(iter(self._logs))).close()
        return self._logs[step]
