"""Records of one size in one file on disk, for blocks that come and go one by one.

There is no file or folder for each block. Where each record lies in the file is known only in the
memory of the process. The file is therefore of no use to another process, and ``close`` removes it.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np

from attention.cache.storage import CorruptedFile


class Records:
    """Lists of arrays by key, of the same shapes and dtypes for every key.

    The file is made when the first key is written. Threads may read and write different keys at the
    same time.
    """

    def __init__(self, path: Path):
        self._path = Path(path)
        self._lock = threading.Lock()
        self._file: int | None = None
        self._shapes: list[tuple[tuple[int, ...], np.dtype]] = []
        self._size = 0
        self._end = 0  # records that the file has room for
        self._free: list[int] = []
        self._at: dict[Hashable, tuple[int, int]] = {}  # (number of the record, its checksum)

    def __len__(self) -> int:
        return len(self._at)

    def write(self, key: Hashable, arrays: Sequence[np.ndarray]) -> None:
        """Keeps arrays under a new key.

        Raises OSError, or ValueError for other shapes than those of the first key.
        """
        shapes = [(x.shape, x.dtype) for x in arrays]
        parts = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays]
        with self._lock:
            if self._file is None:
                self._open(shapes, sum(part.size for part in parts))
            if shapes != self._shapes:
                raise ValueError(f"{key}: arrays of {shapes} in a file of {self._shapes}")
            if not self._free:
                self._free.append(self._end)
                self._end += 1
            number = self._free.pop()
        # Written without the lock: this record is in neither ``_free`` nor ``_at``, so no other
        # thread touches it until it is complete.
        try:
            if (written := os.pwritev(self._file, parts, number * self._size)) != self._size:
                raise OSError(
                    f"{self._path}: {written} of {self._size} bytes of {key} were written"
                )
        except OSError:
            with self._lock:
                self._free.append(number)
            raise
        with self._lock:
            self._at[key] = number, _checksum(parts)

    def read(self, key: Hashable) -> list[np.ndarray]:
        """The arrays of a key. Raises CorruptedFile."""
        number, checksum = self._at[key]
        parts = [
            np.empty(int(np.prod(shape)) * dtype.itemsize, np.uint8)
            for shape, dtype in self._shapes
        ]
        found = os.preadv(self._file, parts, number * self._size)
        if found != self._size or _checksum(parts) != checksum:
            raise CorruptedFile(
                f"{self._path}: {key} is not what was written ({found} of {self._size} bytes)"
            )
        return [
            part.view(dtype).reshape(shape)
            for part, (shape, dtype) in zip(parts, self._shapes, strict=True)
        ]

    def drop(self, key: Hashable) -> None:
        """Forgets a key if it is there; its place serves another one."""
        with self._lock:
            if key in self._at:
                self._free.append(self._at.pop(key)[0])

    def flush(self) -> None:
        """Waits until the disk has everything, and frees the memory in which the system keeps a
        copy of it.
        """
        if self._file is not None:
            os.fdatasync(self._file)
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Removes the file."""
        if self._file is not None:
            os.close(self._file)
            self._path.unlink(missing_ok=True)
            self._file = None

    def _open(self, shapes, size: int) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        # blocks next to each other are not read together
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        self._shapes, self._size = shapes, size


def _checksum(parts: Sequence[np.ndarray]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum
