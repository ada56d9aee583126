"""Files of strangers, within bounds: what is too large, too deep or no JSON is named and refused.

The time that reading takes is proportional to the bytes, which are bounded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from rl_code.foreign.dump import DumpError

# Bytes of a line, and of a file when it is unpacked.
MOST_OF_LINE = 64 << 20
MOST_OF_FILE = 8 << 30
# Bytes of a table, all of which is read at once.
MOST_OF_TABLE = 2 << 30
# Files of a dump, rows of a file, and levels of a value.
MOST_FILES = 200_000
MOST_ROWS = 10_000_000
MOST_LEVELS = 64
_SHOWN = 80
_MOST_WORDS = 400
_UNPACK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a file, by which it can be read again."""

    path: Path
    # From 1.
    number: int
    # First byte, in the unpacked file.
    offset: int

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}"


def wrong(place: object, field: str, expected: str, found: Any) -> NoReturn:
    """Raises the DumpError for a value that cannot be used."""
    at = f", field {field!r}" if field else ""
    raise DumpError(f"{place}{at}: expected {expected}, found {show(found)}")


def show(value: Any) -> str:
    """The beginning of a value's text."""
    if isinstance(value, Words):
        return textwrap.shorten(value, _MOST_WORDS, placeholder=" ...")
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


class Words(str):
    """A text for ``wrong`` that is no value of the file."""


def files_of(paths: Sequence[Path], patterns: Sequence[str], what: str) -> list[Path]:
    """The files that are named, and those of named folders whose names fit a pattern, in order.

    what: the files that are looked for, for messages. Symbolic links below a folder are passed
    over. Raises DumpError where there are none.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_file():
            found[path] = None
            continue
        if not path.is_dir():
            raise DumpError(f"{path}: no such file or folder; name {what}, or their folder")
        inside = (file for pattern in patterns for file in path.rglob(pattern))
        own = [file for file in inside if file.is_file() and not file.is_symlink()]
        if not own:
            raise DumpError(f"{path} holds no {what}: no file like {' or '.join(patterns)}")
        found |= dict.fromkeys(sorted(own))
        if len(found) > MOST_FILES:
            raise DumpError(f"{path} holds more than {MOST_FILES:,} files; name folders inside")
    return list(found)


class Lines:
    """JSON lines of a file, plain or packed with zstd. A context manager."""

    def __init__(self, path: Path):
        self.path = path
        self._file: IO[bytes] = _unpacked(path) if path.suffix == ".zst" else _opened(path)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[tuple[Line, dict[str, Any]]]:
        self._file.seek(0)
        offset = 0
        number = 0
        while data := self._file.readline(MOST_OF_LINE + 1):
            number += 1
            line = Line(self.path, number, offset)
            offset += len(data)
            if number > MOST_ROWS or offset > MOST_OF_FILE:
                raise DumpError(f"{line}: more than {MOST_ROWS:,} lines or {MOST_OF_FILE:,} bytes")
            if data.strip():
                yield line, _parsed(line, data)

    def at(self, line: Line) -> dict[str, Any]:
        """A line once more."""
        self._file.seek(line.offset)
        return _parsed(line, self._file.readline(MOST_OF_LINE + 1))


def _opened(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from error


def _unpacked(path: Path) -> IO[bytes]:
    """A file without a name that holds what was packed with zstd."""
    import zstandard

    target = tempfile.TemporaryFile()
    size = 0
    try:
        with _opened(path) as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            while data := reader.read(_UNPACK):
                size += len(data)
                if size > MOST_OF_FILE:
                    raise DumpError(f"{path}: more than {MOST_OF_FILE:,} bytes when unpacked")
                target.write(data)
    except zstandard.ZstdError as error:
        target.close()
        raise DumpError(f"{path}: expected a file packed with zstd: {error}") from error
    except BaseException:
        target.close()
        raise
    return target


def _parsed(line: Line, data: bytes) -> dict[str, Any]:
    if len(data) > MOST_OF_LINE:
        raise DumpError(f"{line}: a line of more than {MOST_OF_LINE:,} bytes")
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DumpError(f"{line}: byte {error.start} is no UTF-8") from error
    except RecursionError:
        raise DumpError(f"{line}: values nested more than {MOST_LEVELS} deep") from None
    except ValueError as error:
        cut = "" if data.endswith(b"\n") else "; it is cut short: import it when the run has ended"
        raise DumpError(f"{line}: expected a JSON object, found {show(data)}: {error}{cut}") from (
            error
        )
    if not isinstance(value, dict):
        wrong(line, "", "a JSON object", value)
    check_levels(line, value)
    return value


def check_levels(place: object, value: Any) -> None:
    """Raises DumpError for a value of more than ``MOST_LEVELS`` levels."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inner: list[Any] = []
        for one in level:
            found = one.values() if isinstance(one, dict) else one
            # numbers are what most lists hold
            inner += [item for item in found if isinstance(item, dict | list)]
        if not inner:
            return
        level = inner
    raise DumpError(f"{place}: values nested more than {MOST_LEVELS} deep")


def parquet_rows(path: Path) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Place and values of every row of a Parquet file. Raises DumpError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DumpError(
            f"{path}: Parquet needs pyarrow; install the extra: pip install -e '.[data]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            groups = range(file.metadata.num_row_groups)
            size = sum(file.metadata.row_group(group).total_byte_size for group in groups)
            if file.metadata.num_rows > MOST_ROWS:
                raise DumpError(f"{path}: more than {MOST_ROWS:,} rows")
            number = taken = 0
            for batch in file.iter_batches(batch_size=256) if size <= MOST_OF_TABLE else ():
                taken += batch.nbytes  # the file's own words need not be true
                if taken > MOST_OF_TABLE:
                    break
                for row in batch.to_pylist():
                    number += 1
                    line = Line(path, number, number)
                    # times, decimals and bytes become words
                    row = json.loads(json.dumps(row, default=repr))
                    check_levels(line, row)
                    yield line, row
            if max(size, taken) > MOST_OF_TABLE:
                raise DumpError(f"{path}: more than {MOST_OF_TABLE:,} bytes when unpacked")
    except DumpError:
        raise
    # among them those of texts that are no UTF-8
    except (OSError, ValueError, OverflowError, RecursionError, pyarrow.ArrowException) as error:
        raise DumpError(f"{path}: expected a Parquet file: {error}") from error


def number_of(place: object, field: str, value: Any) -> float:
    """A number of a file, which may be infinite or NaN."""
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return wrong(place, field, "a number", value)


def whole_number(place: object, field: str, value: Any) -> int:
    """A whole number from 0 on."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value < 1 << 31:
        wrong(place, field, "a whole number from 0 on", value)
    return value


def array_of(place: object, field: str, value: Any, kinds: str, dtype: type) -> np.ndarray:
    """A list of numbers as an array of one axis. kinds: those of numpy that it may have."""
    if not isinstance(value, list):
        wrong(place, field, "a list", value)
    try:
        found = np.asarray(value) if value else np.zeros(0, dtype)
    except ValueError:
        wrong(place, field, "a list of numbers", value)
    if found.ndim != 1 or found.dtype.kind not in kinds:
        wrong(place, field, "a list of numbers" if "f" in kinds else "a list of ids", value)
    if dtype is np.int32 and len(found) and not 0 <= found.min() <= found.max() < 1 << 31:
        wrong(place, field, "ids from 0 on", value)
    return found.astype(dtype)


def digest(value: Any) -> str:
    """Twelve digits that tell values apart."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
