"""Endless streams of tasks, each made when it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import overload

from rl_code.tasks.programs import SPLITS
from rl_code.types import Task

STREAM_LENGTH = 1 << 20


class Stream(Sequence[Task]):
    """An endless stream as a sequence of STREAM_LENGTH tasks, each made when it is asked for.

    make: the task of a number.
    """

    def __init__(self, make: Callable[[int], Task]):
        self._make = functools.lru_cache(1024)(make)

    def __len__(self) -> int:
        return STREAM_LENGTH

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(STREAM_LENGTH))]
        if not -STREAM_LENGTH <= index < STREAM_LENGTH:
            raise IndexError(f"{index=} is outside the stream of {STREAM_LENGTH} tasks")
        return self._make(index % STREAM_LENGTH)


def check_split(split: str) -> None:
    """Raise ValueError for what is no split of a stream."""
    if split not in SPLITS:
        raise ValueError(f"{split=} is not one of {', '.join(SPLITS)}")
