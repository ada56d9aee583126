"""Recorded groups as a Grain source. Several groups are read in threads, ahead of their use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import grain

from rl_code.store import group_records, steps
from rl_code.store.errors import StoreError, explain
from rl_code.store.group_records import GroupRecord

_READ = grain.ReadOptions(num_threads=4, prefetch_buffer_size=64)


class RecordSource:
    """A random-access source of the groups at some places (step, number). Can be pickled for
    Grain's workers.
    """

    def __init__(self, folder: str | Path, places: Sequence[tuple[int, int]]):
        self._folder = Path(folder).absolute()
        self._places = tuple(places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> GroupRecord:
        """Raises IndexError outside of [0, len), StoreError for a group that is missing or
        damaged.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{index=} must be in [0, {len(self)})")
        return read_record(self._folder, *self._places[index])

    def __repr__(self) -> str:
        return f"RecordSource({str(self._folder)!r}, {len(self)} places)"


def dataset(folder: str | Path, places: Sequence[tuple[int, int]]) -> grain.MapDataset:
    """The groups at these places, as from ``GroupStore.places``, as a dataset of records."""
    return grain.MapDataset.source(RecordSource(folder, places))


def read_ahead(folder: str | Path, places: Sequence[tuple[int, int]]) -> Iterator[GroupRecord]:
    """The groups at these places in their order. Raises StoreError."""
    if len(places) == 1:
        return iter([read_record(Path(folder), *places[0])])
    return iter(dataset(folder, places).to_iter_dataset(_READ) if places else ())


def read_record(folder: Path, step: int, number: int) -> GroupRecord:
    """What was delivered for an item to the store in ``folder``, verified. Raises StoreError."""
    path = steps.group_path(folder, step, number)
    with explain("read the group", path):
        data = path.read_bytes()
    record = group_records.decode(data, path)
    if (record.step, record.number) != (step, number):
        raise StoreError(f"{path} holds the group of item ({record.step}, {record.number})")
    return record
