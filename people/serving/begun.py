"""Answers that a server has begun, in a file, for the record of those that a kill cut off.

An answer is recorded when it has ended. Of those that a server was sampling when it was killed the
file tells the next one, which records each as aborted: counted, and not trained on. The file has no
text and no tokens. What is written outlives the process and need not be on the disk: a machine that
loses its power loses these counts.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from people.feedback.records import AnswerRecord
from rl_code.host.files import lock, make_private, write_atomically

# Bytes after which lines of answers that have ended are removed.
_MOST_BYTES = 1 << 20
# The file of the cycle's server, in the workdir.
BEGUN = "begun.jsonl"
# What the name of a file's lock ends with.
_LOCK = ".lock"


class Begun:
    """The file of one server; its methods may be called from any thread."""

    def __init__(self, path: Path):
        """path: of the file, or what the names of several begin with, where several servers run.

        Raises OSError.
        """
        self._path, self._held = _free(path)
        make_private(self._path)
        # Those of servers before this one.
        self.left = tuple(_read(self._path))
        self._open = {record.id: _line(record) for record in self.left}
        self._lock = threading.Lock()
        self._rewrite()

    def begin(self, records: Sequence[AnswerRecord]) -> None:
        """Notes answers whose sampling begins, as they are recorded if nothing comes of them."""
        lines = {record.id: _line(record) for record in records}
        with self._lock:
            self._open |= lines
            self._append("".join(lines.values()))

    def end(self, ids: Sequence[str]) -> None:
        """Notes that answers have ended: they are recorded, or their client knows that they are
        not.
        """
        with self._lock:
            ended = [id for id in ids if self._open.pop(id, None) is not None]
            self._append("".join(json.dumps({"end": id}) + "\n" for id in ended))

    def compact(self) -> None:
        """Removes the lines of all that have ended."""
        with self._lock:
            if not self._file.closed:
                self._file.close()
                self._rewrite()

    def close(self) -> None:
        """Lets another server have the file."""
        self.compact()
        self._file.close()
        os.close(self._held)

    def _append(self, text: str) -> None:
        if not text or self._file.closed:
            return
        try:
            self._file.write(text)
            self._file.flush()
            if self._file.tell() > _MOST_BYTES + sum(map(len, self._open.values())):
                self._file.close()
                self._rewrite()
        except OSError as error:  # people are answered all the same
            logging.warning("%s cannot be written: %s", self._path, error)

    def _rewrite(self) -> None:
        write_atomically(self._path, "".join(self._open.values()).encode(), private=True)
        self._file = open(self._path, "a", encoding="utf-8")


def forget(path: Path, user: str) -> int:
    """Removes the answers of a user from files that killed servers have left; how many these were.
    A file whose server runs is left alone: its answers are recorded when they have ended.

    path: as of ``Begun``. user: as records name them. Raises OSError.
    """
    count = 0
    for file in (path, *path.parent.glob(f"{path.name}.[0-9]*")):
        if file.suffix == _LOCK or not file.is_file():
            continue
        try:
            held = lock(file.with_name(file.name + _LOCK))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            continue
        try:
            left = list(_read(file))
            kept = [record for record in left if record.user != user]
            if len(kept) < len(left):
                write_atomically(file, "".join(map(_line, kept)).encode(), private=True)
            count += len(left) - len(kept)
        finally:
            os.close(held)
    return count


def _free(path: Path) -> tuple[Path, int]:
    """A file that no other server has, and the lock of it. Raises OSError."""
    for number in itertools.count():
        file = path.with_name(f"{path.name}.{number}") if number else path
        try:
            return file, lock(file.with_name(file.name + _LOCK))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
    raise AssertionError  # there are more numbers than servers


def _line(record: AnswerRecord) -> str:
    return json.dumps({"begin": dataclasses.asdict(record)}) + "\n"


def _read(path: Path) -> Iterator[AnswerRecord]:
    """The answers that were begun and have not ended. A kill may have cut the last line off, and a
    loss of power may have spoiled others: these tell nothing.
    """
    found: dict[str, AnswerRecord] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            row: dict[str, Any] = json.loads(line) if line else {"end": ""}
            if "end" in row:
                found.pop(row["end"], None)
                continue
            fields = row["begin"]
            tuples = {name: tuple(one) for name, one in fields.items() if isinstance(one, list)}
            found[fields["id"]] = AnswerRecord(**fields | tuples)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logging.warning("%s, line %d is no answer: %s", path, number, error)
    yield from found.values()
