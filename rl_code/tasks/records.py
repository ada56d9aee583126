"""Reading JSON-lines files whose rows must have certain fields; what is wrong is named by file,
line and field.
"""

from __future__ import annotations

import ast
import gzip
import json
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

_SHOWN = 80


class TaskFileError(ValueError):
    """A file of tasks that is missing or malformed."""


def read_rows(
    path: Path, fields: Mapping[str, type | tuple[type, ...]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and row of every line that is not blank; ``.gz`` files are unpacked.

    fields: name -> type that every row must have there; further fields are kept as they are.

    Raises TaskFileError naming file, line and field, what was expected and what was found; only the
    file when it is missing or has no rows.
    """
    if not path.is_file():
        raise TaskFileError(
            f"{path}: no such file of tasks; the config file says where it looks for one"
        )
    rows = 0
    for line, text in _lines(path):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise TaskFileError(
                f"{path}, line {line}: expected a JSON object, found invalid JSON: {error}"
            ) from error
        if not isinstance(row, dict):
            raise TaskFileError(f"{path}, line {line}: expected a JSON object, found {_show(row)}")
        for field, kind in fields.items():
            kinds = kind if isinstance(kind, tuple) else (kind,)
            if field not in row:
                malformed(path, line, field, _names(kinds), "nothing")
            if type(row[field]) not in kinds:
                malformed(path, line, field, _names(kinds), _show(row[field]))
        rows += 1
        yield line, row
    if not rows:
        raise TaskFileError(f"{path}: expected one task a line, found no rows")


def malformed(path: Path, line: int, field: str, expected: str, found: str) -> NoReturn:
    """Raises the TaskFileError for a field whose value cannot be used."""
    raise TaskFileError(f"{path}, line {line}, field {field!r}: expected {expected}, found {found}")


def parse_python(path: Path, line: int, field: str, source: str) -> ast.Module:
    """The syntax tree of a field that must hold Python code; a TaskFileError names the field
    otherwise.
    """
    with warnings.catch_warnings():
        # such as "\d" in an ordinary string, common in old tasks
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError) as error:
            malformed(path, line, field, "Python code", f"{_show(source)} ({error})")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        lines = enumerate(file, start=1)
        line = 0
        while True:
            try:
                line, text = next(lines)
            except StopIteration:
                return
            except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
                raise TaskFileError(
                    f"{path}, after line {line}: expected UTF-8 text, found {error}"
                ) from error
            yield line, text


def _names(kinds: tuple[type, ...]) -> str:
    return " or ".join(
        {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}[
            kind
        ]
        for kind in dict.fromkeys(float if kind is int else kind for kind in kinds)
    )


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
