"""Recorded groups as a Grain dataset, in the order in which they were trained on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import grain
import numpy as np

from rl_code.store.records import Record
from rl_code.store.store import GroupStore, read_record


class RecordSource:
    """A random-access source of the records of some steps, by (step, number). Can be pickled for Grain's workers."""

    def __init__(self, folder: str | Path, steps: Sequence[int]):
        """Raises StoreError unless every step is consumed."""
        self._folder, self._steps = Path(folder).absolute(), tuple(steps)
        store = GroupStore(self._folder)
        self._ends = np.cumsum([len(store.consumption(step)["digests"]) for step in self._steps], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._steps else 0

    def __getitem__(self, index: int) -> Record:
        """Raises IndexError outside of [0, len), StoreError for a damaged record."""
        if not 0 <= index < len(self):
            raise IndexError(f"{index=} must be in [0, {len(self)})")
        place = int(np.searchsorted(self._ends, index, side="right"))
        number = index - (int(self._ends[place - 1]) if place else 0)
        return read_record(self._folder, self._steps[place], number)

    def __repr__(self) -> str:
        return f"RecordSource({str(self._folder)!r}, steps={self._steps})"


def dataset(folder: str | Path, steps: Sequence[int] | None = None) -> grain.MapDataset:
    """The records of consumed steps (all those there are now, unless given) as a dataset of ``Record``."""
    return grain.MapDataset.source(RecordSource(folder, GroupStore(folder).consumed() if steps is None else steps))


def by_step(folder: str | Path, steps: Sequence[int]) -> Iterator[tuple[int, list[Record]]]:
    """Consumed steps with their records, which are read ahead in threads. Raises StoreError for a damaged one."""
    read_ahead = grain.ReadOptions(num_threads=4, prefetch_buffer_size=64)
    records = dataset(folder, steps).to_iter_dataset(read_ahead)
    for step, found in itertools.groupby(records, key=lambda record: record.step):
        yield step, list(found)
