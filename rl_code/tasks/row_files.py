"""Rows of files of tasks: JSON lines (.jsonl, .jsonl.gz) or Parquet.

``each_task`` makes a task of every row, or says why there is none: one row that cannot be read
leaves the others alone. ``each_row`` reads rows whose columns must have certain types. What is
wrong with a row is named by file, line and column.
"""

from __future__ import annotations

import ast
import gzip
import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rl_code.environment.sandbox.errors import SandboxFault
from rl_code.text import python_source
from rl_code.types import Task

_SHOWN = 80


class TaskFileError(ValueError):
    """A file of tasks that is missing or malformed."""


class RowError(TaskFileError):
    """One row of a file that no task can be made of; the message names file and line."""


# Id of a row, and its task or why there is none.
type Read = tuple[str, Task | RowError]


class HasId(Protocol):
    """A task, or what one is built of."""

    @property
    def id(self) -> str: ...


def each_task[T: HasId](
    path: Path,
    columns: Mapping[str, type | tuple[type, ...]],
    make: Callable[[int, dict[str, Any]], T | None],
    named: str = "task_id",
) -> Iterator[tuple[str, T | RowError]]:
    """(id, task) of every row, or (id, why there is none) for one that cannot be read, lacks a
    column, has the id of another one, or of which ``make`` makes none.

    columns: as of ``each_row``. make: from line and row; None leaves a row out. named: the column
    that has the ids. The id of a row without a task is its place: name of the file, and line.
    Raises TaskFileError for a file as a whole, and what else ``make`` raises as TaskFileError.
    """
    seen: set[str] = set()
    for line, row in each_row(path, columns):
        try:
            if isinstance(row, RowError):
                raise row
            task = make(line, row)
            if task is None:
                continue
            if task.id in seen:
                malformed(path, line, named, "an id that no other row has", repr(task.id))
        except RowError as error:
            yield place_of(path, line), error
        except (TaskFileError, SandboxFault):
            raise
        except Exception as error:  # rows may hold anything: each has a verdict of its own
            words = f"{type(error).__name__}: {error}"[:300]
            wrong = f"{path}, line {line}: expected a row of a task, found {words}"
            yield place_of(path, line), RowError(wrong)
        else:
            seen.add(task.id)
            yield task.id, task


def readable(rows: Iterable[Read]) -> list[Task]:
    """The tasks of rows. Raises the RowError of the first row without one."""
    tasks = []
    for _, found in rows:
        if isinstance(found, RowError):
            raise found
        tasks.append(found)
    return tasks


def place_of(path: Path, line: int) -> str:
    """The name of a row that has no task."""
    return f"{path.name}:{line}"


def count_rows(path: Path) -> int:
    """Number of rows of a file, those that cannot be read included. Raises TaskFileError."""
    return sum(1 for _ in _each_row(path))


def each_row(
    path: Path, columns: Mapping[str, type | tuple[type, ...]]
) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """Line number (from 1) and row of every line that is not blank, or why it cannot be read;
    ``.gz`` files are unpacked.

    columns: name -> type that every row must have there; further columns are kept as they are. A
    row of a Parquet file counts as a line.

    Raises TaskFileError when the file is missing or has no rows. A RowError names file, line and
    column, what was expected and what was found.
    """
    for line, row in _each_row(path):
        try:
            if not isinstance(row, RowError):
                check_columns(path, line, row, columns)
            yield line, row
        except RowError as error:
            yield line, error


def _each_row(path: Path) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """Line and row, or why it cannot be read. Raises TaskFileError for a file as a whole."""
    if path.is_dir():
        raise TaskFileError(f"{path} is a folder; name a file with a row a line, or Parquet")
    if not path.is_file():
        raise TaskFileError(
            f"{path}: no such file; looked for at {path.absolute()}, since a path that does "
            "not begin with / counts from the current folder"
        )
    rows = 0
    for line, row in _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path):
        rows += 1
        yield line, row
    if not rows:
        raise TaskFileError(f"{path}: expected one task a line, found no rows")


def check_columns(
    path: Path, line: int, row: Mapping[str, Any], columns: Mapping[str, type | tuple[type, ...]]
) -> None:
    """Raises RowError for a row that lacks a column, or has another type there."""
    for column, kind in columns.items():
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if column not in row:
            has = ", ".join(map(repr, row)) or "no columns"
            malformed(path, line, column, _names(kinds), f"nothing; the row has {has}")
        if type(row[column]) not in kinds:
            malformed(path, line, column, _names(kinds), show(row[column]))


def malformed(path: Path, line: int, field: str, expected: str, found: str) -> NoReturn:
    """Raises the RowError for a column whose value cannot be used."""
    raise RowError(f"{path}, line {line}, field {field!r}: expected {expected}, found {found}")


def parse_python(path: Path, line: int, field: str, source: str) -> ast.Module:
    """The syntax tree of a column that must hold Python code; a RowError names the column
    otherwise.
    """
    with warnings.catch_warnings():
        # such as "\d" in an ordinary string, common in old tasks
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            return python_source.parse(source)
        except SyntaxError as error:
            malformed(path, line, field, "Python code", f"{show(source)} ({error})")


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and values of every row of a Parquet file, lists and structs as Python's own."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise TaskFileError(
            f"{path}: Parquet needs pyarrow; install the extra: pip install -e '.[data]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            line = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    line += 1
                    yield line, row
    except (OSError, pyarrow.ArrowException) as error:
        raise TaskFileError(f"{path}: expected a Parquet file: {error}") from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    for line, text in _lines(path):
        if isinstance(text, RowError):
            yield line, text
            continue
        if not text.strip():
            continue
        begin = f"{path}, line {line}: expected a JSON object, found"
        try:
            text.encode()  # what was no UTF-8 has become a lone surrogate
            row = json.loads(text)
        except UnicodeEncodeError as error:
            yield line, RowError(f"{begin} a byte that is no UTF-8 at column {error.start}")
        except RecursionError:
            yield line, RowError(f"{begin} values nested too deep")
        except ValueError as error:
            yield line, RowError(f"{begin} invalid JSON: {error}")
        else:
            is_row = isinstance(row, dict)
            yield line, row if is_row else RowError(f"{begin} {show(row)}")


def _lines(path: Path) -> Iterator[tuple[int, str | RowError]]:
    """Line number and text, with a lone surrogate for each byte that is no UTF-8; at last an error
    where the rest of a file cannot be read.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        opened = opener(path, "rt", encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise TaskFileError(f"{path} cannot be read: {error}") from error
    with opened as file:
        lines = enumerate(file, start=1)
        line = 0
        while True:
            try:
                line, text = next(lines)
            except StopIteration:
                return
            except (EOFError, OSError, zlib.error) as error:
                where = f"{path}, line {line + 1}"
                yield line + 1, RowError(f"{where}: expected text to the file's end, found {error}")
                return
            yield line, text


def _names(kinds: tuple[type, ...]) -> str:
    words = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return " or ".join(dict.fromkeys(words[kind] for kind in kinds))


def show(value: Any) -> str:
    """The beginning of a value's text."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
