"""Opening GGUF files, for the tokenizer and the weights in them."""

from __future__ import annotations

import functools
from pathlib import Path

import gguf
import numpy as np


def open_gguf(path: str | Path) -> gguf.GGUFReader:
    """The file's metadata and memory-mapped tensors; the last file is kept, since reading a
    vocabulary takes seconds.

    Raises ValueError when the file is not GGUF.
    """
    stat = Path(path).stat()
    return _open_gguf(Path(path), stat.st_mtime_ns, stat.st_size)


class _Reader(gguf.GGUFReader):
    """The published reader. It takes a slice of the file for each string of a vocabulary, and a
    slice of a plain array costs a third of one of a ``numpy.memmap``.
    """

    def _get(self, *args, **kwargs) -> np.ndarray:
        if isinstance(self.data, np.memmap):
            # the same mapped memory, which the view keeps open
            self.data = self.data.view(np.ndarray)
        return super()._get(*args, **kwargs)


@functools.lru_cache(maxsize=1)
def _open_gguf(path: Path, modified_ns: int, size: int) -> gguf.GGUFReader:
    try:
        return _Reader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} ({size} bytes) is not a whole GGUF file: {error}") from error
