"""Recorded groups as a Grain source. Several groups are read in threads, ahead of their use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_code.store.group_records import GroupRecord
from rl_code.store.reader import RecordReader

if TYPE_CHECKING:
    import grain  # loads jax, which those who read a single group do without


class RecordSource:
    """A random-access source of the groups at some places (step, number). Can be pickled for
    Grain's workers.
    """

    def __init__(self, folder: str | Path, places: Sequence[tuple[int, int]]):
        self._reader = RecordReader(folder)
        self._places = tuple(places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> GroupRecord:
        """Raises IndexError outside of [0, len), StoreError for a group that is missing or
        damaged.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{index=} must be in [0, {len(self)})")
        return self._reader.group(*self._places[index])

    def __repr__(self) -> str:
        return f"RecordSource({str(self._reader.folder)!r}, {len(self)} places)"


def dataset(folder: str | Path, places: Sequence[tuple[int, int]]) -> grain.MapDataset:
    """The groups at these places, as from ``GroupStore.places``, as a dataset of records."""
    import grain

    return grain.MapDataset.source(RecordSource(folder, places))


def read_ahead(folder: str | Path, places: Sequence[tuple[int, int]]) -> Iterator[GroupRecord]:
    """The groups at these places in their order. Raises StoreError."""
    if len(places) == 1:
        return iter([RecordReader(folder).group(*places[0])])
    if not places:
        return iter(())
    import grain

    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=64)
    return iter(dataset(folder, places).to_iter_dataset(options))
