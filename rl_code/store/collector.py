"""The groups of an open step, as they arrive at the learner, and which of them it takes.

Several actors may deliver a group for one item: an actor that hung, and the one that took its item
over. The learner takes the first that it sees. When all groups of a part of the plan are there, it
writes down where each of them is, by one link, before it uses any. From then on everybody reads
those, also a learner that is killed and begins again, and whatever is delivered later counts
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import logging

from rl_code.store import group_records
from rl_code.store import steps as steps_lib
from rl_code.store.errors import StoreError
from rl_code.store.group_logs import LogReader, Place
from rl_code.store.group_records import GroupRecord
from rl_code.store.processes import StoreProcess
from rl_code.store.reader import RecordReader
from rl_code.store.source import read_ahead
from rl_code.store.steps import Item, Listing


class Collector:
    """Groups that have arrived for a step.

    process: of the learner, which takes groups. None for its other processes: they see a group when
      it is taken.
    The attribute ``records`` has the groups by number.
    """

    def __init__(self, reader: RecordReader, step: int, process: StoreProcess | None):
        self.records: dict[int, GroupRecord] = {}
        self.duplicates = 0  # groups that were delivered after another one of their item
        self._reader, self._step, self._process = reader, step, process
        self._settled: set[int] = set()  # parts of the plan whose groups are taken
        self._places: dict[int, Place] = {}
        self._logs = LogReader(steps_lib.groups_folder(reader.folder, step))
        self._damaged: dict[Place, StoreError] = {}

    def look(self, listing: Listing) -> None:
        """Takes what has arrived. listing: of the step, as it is now. Raises StoreError."""
        parts = {first: self._reader.part(self._step, first) for first in listing.parts}
        for first in listing.parts if listing.consumed else listing.taken:
            self._settle(first, parts[first])
        if self._process is None or self._settled.issuperset(parts):
            return
        self._take_delivered()
        for first, items in parts.items():
            if first not in self._settled and all(item.number in self.records for item in items):
                self._take(first, items)

    def refuse_damage(self) -> None:
        """Raises the StoreError of a group that arrived damaged, if one did."""
        for error in self._damaged.values():
            raise error

    def _settle(self, first: int, items: Sequence[Item]) -> None:
        """Reads the groups that were taken for a part of the plan."""
        if first not in self._settled:
            wanted = [(self._step, item.number) for item in items]
            for record in read_ahead(self._reader.folder, wanted):
                self.records[record.number] = record
            self._settled.add(first)

    def _take_delivered(self) -> None:
        for place in list(self._damaged):  # a network drive may show its content late
            data = self._reader.read_place(self._step, place)
            if self._decode(place, data):
                del self._damaged[place]
        for place, data in self._logs.look():
            self._decode(place, data)

    def _decode(self, place: Place, data: bytes) -> bool:
        """Notes a group that was delivered; whether it could be read."""
        try:
            record = group_records.decode(data, place)
        except StoreError as error:
            if place not in self._damaged:
                logging.warning("%s", error)
            self._damaged[place] = error
            return False
        if record.number in self.records:
            self.duplicates += 1
        else:
            self.records[record.number], self._places[record.number] = record, place
        return True

    def _take(self, first: int, items: Sequence[Item]) -> None:
        """Writes down which groups are taken for a part of the plan."""
        path = steps_lib.taken_path(self._reader.folder, self._step, first)
        content = steps_lib.taken_bytes([self._places[item.number] for item in items])
        what = f"which groups of step {self._step} were taken"
        if self._process.publish(path, content, what):
            self._settled.add(first)
        else:  # by another start of the learner, which has ended or is about to
            self._settle(first, items)
