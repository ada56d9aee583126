"""Proves, from the files alone, that a run used every planned group exactly once and none that was
too old.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rl_code.store.errors import StoreError
from rl_code.store.group_records import GroupRecord
from rl_code.store.reader import Removed
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore


@dataclasses.dataclass
class Report:
    """Result of ``check``."""

    # steps that are planned
    steps: int = 0
    # steps that are consumed
    consumed: int = 0
    # groups in consumed steps
    groups: int = 0
    # groups delivered for other steps
    waiting: int = 0
    # items taken over from lost actors
    takeovers: int = 0
    # what ``record.keep`` has removed; None if all is there
    removed: Removed | None = None
    # The greatest staleness of any token when it was trained on; None before the first.
    staleness_max: int | None = None
    # what is not as it must be, in words
    problems: list[str] = dataclasses.field(default_factory=list)


def check(folder: str | Path, max_staleness: int) -> Report:
    """Reads a whole store.

    It proves that
    - steps are planned and consumed without gaps;
    - every item of a consumed plan has one group, which answers the item, is undamaged, and is the
      one whose digest was written down;
    - no group stands in two places;
    - no group was more than ``max_staleness`` versions old when it was trained on.

    Raises StoreError when there is no store. Everything else is a problem in the report.
    """
    audit = _Audit(GroupStore(folder), max_staleness)
    found = audit.store.reader.steps()
    audit.report.removed = audit.store.reader.removed()
    for step in found:
        try:
            audit.check_step(step)
        except StoreError as error:
            audit.report.problems.append(str(error))
    if found and found != list(range(found[0], found[-1] + 1)):
        audit.report.problems.append(f"steps are missing between {found[0]} and {found[-1]}")
    return audit.report


class _Audit:
    """A check in progress."""

    def __init__(self, store: GroupStore, max_staleness: int):
        self.store, self.max_staleness = store, max_staleness
        self.report = Report()
        self._open: int | None = None  # the first step that is not consumed
        self._places: dict[str, tuple[int, int]] = {}  # digest -> where it was seen

    def check_step(self, step: int) -> None:
        report = self.report
        report.steps += 1
        listing = self.store.reader.listing(step)
        if listing is None:
            return
        report.takeovers += self.store.takeovers(step)
        items = self.store.items(step, listing)
        if [item.number for item in items] != list(range(len(items))):
            report.problems.append(
                f"step {step}: its plan has the numbers {[item.number for item in items]}"
            )
        groups = self.store.reader.groups(step, listing)
        if stray := sorted(groups - {item.number for item in items}):
            report.problems.append(f"step {step}: groups {stray} are in no plan")
        delivered = self._records([item for item in items if item.number in groups])
        if not listing.consumed:
            self._open = step if self._open is None else self._open
            report.waiting += len(delivered)
            return
        report.consumed += 1
        report.groups += len(delivered)
        if self._open is not None:
            report.problems.append(
                f"step {step} is consumed and step {self._open} before it is not"
            )
        self._check_consumption(step, items, delivered)

    def _records(self, items: list[Item]) -> dict[int, GroupRecord]:
        """The sound groups of these items by number."""
        delivered = {}
        for item in items:
            try:
                record = self.store.record(item.step, item.number)
            except StoreError as error:
                self.report.problems.append(str(error))
                continue
            delivered[item.number] = record
            if problem := item.mismatch(record.group):
                self.report.problems.append(
                    f"the group of item {item} does not answer it: {problem}"
                )
            place = self._places.setdefault(record.digest, (item.step, item.number))
            if place != (item.step, item.number):
                self.report.problems.append(f"item {item} has the same group as item {place}")
        return delivered

    def _check_consumption(
        self, step: int, items: list[Item], delivered: dict[int, GroupRecord]
    ) -> None:
        problems = self.report.problems
        consumption = self.store.consumption(step)
        version = consumption["version"]
        digests = consumption["digests"]
        if len(digests) != len(items):
            problems.append(
                f"step {step}: {len(digests)} groups were consumed, {len(items)} planned"
            )
        for item, digest in zip(items, digests, strict=False):
            record = delivered.get(item.number)
            if record is None:
                problems.append(f"item {item} was consumed and its group is not there")
                continue
            if record.digest != digest:
                problems.append(
                    f"item {item}: the group consumed is another one than the group that is there"
                )
            if not item.trained or not record.versions:
                continue
            staleness = version - record.versions[0]
            known = self.report.staleness_max
            self.report.staleness_max = staleness if known is None else max(known, staleness)
            if staleness > self.max_staleness or record.versions[-1] > version:
                problems.append(
                    f"item {item} was consumed at version {version} and sampled by versions "
                    f"{record.versions}; "
                    f"the bound is {self.max_staleness}"
                )
