"""The order in which tasks are used: a new permutation of all of them in every epoch, by seed and
position alone, or the order of their source.
"""

from __future__ import annotations

import functools

import grain


class Shuffled:
    """An endless stream of task indices. Element i is a function of (count, seed, i), so a
    position is the only state.

    Elements [e * count, (e + 1) * count) are the permutation of epoch e: nothing is skipped,
    nothing repeated.
    """

    def __init__(self, count: int, seed: int):
        if count < 1:
            raise ValueError(f"{count=}: there must be a task")
        self._count, self._seed = count, seed % 2**32

    def __getitem__(self, position: int) -> int:
        """Index of the task at ``position`` >= 0."""
        if position < 0:
            raise IndexError(f"{position=} must not be negative")
        return _shuffled(self._count, self._seed, position)


# An index among few tasks costs milliseconds: grain permutes a block of at least 2**16 numbers, and
# goes on from one of them to the next until it meets that of a task. Pools ask for an epoch often.
@functools.lru_cache(2**14)
def _shuffled(count: int, seed: int, position: int) -> int:
    return int(_dataset(count, seed)[position])


@functools.lru_cache(16)
def _dataset(count: int, seed: int) -> grain.MapDataset[int]:
    return grain.MapDataset.range(count).shuffle(seed=seed).repeat()


class AsGiven:
    """As ``Shuffled``, in the order of the source in every epoch."""

    def __init__(self, count: int):
        if count < 1:
            raise ValueError(f"{count=}: there must be a task")
        self._count = count

    def __getitem__(self, position: int) -> int:
        """Index of the task at ``position`` >= 0."""
        if position < 0:
            raise IndexError(f"{position=} must not be negative")
        return position % self._count


type Order = Shuffled | AsGiven


def order_of(count: int, seed: int, *, shuffled: bool) -> Order:
    """The order of so many tasks."""
    return Shuffled(count, seed) if shuffled else AsGiven(count)
