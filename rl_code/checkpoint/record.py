"""The commit record of a checkpoint: what it holds, and how damage is noticed.

    checkpoints/step_00000040/default/      the arrays, one Orbax tree
    checkpoints/step_00000040/record.json   the record, written last
    checkpoints/pinned.json                 steps that stay, of ``record_keeper``

A checkpoint without a record does not count.

Arrays are checked by checksums of their bits. The devices that hold an array compute its checksum
before it is written, and again after it was restored. So no host reads a file only to check it,
however large the checkpoint is and however many hosts wrote it. For each file the record has the
size. For small files, which say how the arrays are laid out, it also has a CRC-32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import re
import shutil
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from rl_code.checkpoint.checksums import array_checksums
from rl_code.config import read_config
from rl_code.host import files

RECORD = "record.json"
PINNED = "pinned.json"
ARRAYS = "default"  # Orbax's name for the only item of a checkpoint
_FOLDER = re.compile(r"step_(\d{8,})")
# Files up to this many bytes have a CRC-32 in the record: Orbax's descriptions of the arrays, and
# arrays that are small anyway.
_SMALL_BYTES = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what is still
    good.
    """


class ReadersLost(CheckpointError):
    """Processes that read a checkpoint together did not reach each other. It is not damaged."""


@dataclasses.dataclass(frozen=True)
class Record:
    """Contents of a checkpoint's record."""

    # the number it was saved under
    step: int
    # the run's config, a nested dict
    config: dict[str, Any]
    # counters and the position in the data
    position: dict[str, Any]
    # dtype and shape of each leaf of the state in words, as ``arrays.describe`` gives them
    arrays: dict[str, str]
    # checksum of the bits of each stored array
    checksums: dict[str, str]
    # score by which the best checkpoint is chosen; None where the config names no metric
    score: float | None
    # size of each file and, of small ones, CRC-32; by path in the checkpoint's folder
    files: dict[str, tuple[int, int | None]]


def folder_of(checkpoints: Path, step: int) -> Path:
    """The folder of one checkpoint."""
    return checkpoints / f"step_{step:08d}"


def steps(checkpoints: Path) -> list[int]:
    """Steps that have a record, oldest first."""
    found = [
        int(match.group(1))
        for path in checkpoints.glob("step_*")
        if (match := _FOLDER.fullmatch(path.name)) and (path / RECORD).exists()
    ]
    return sorted(found)


def write(directory: Path, record: Record) -> None:
    """Commits a checkpoint whose arrays are all written. From then on it counts, even after a loss
    of power. ``record.files`` is filled in here. Raises OSError.
    """
    # Files and the names of files reach the disk before the record that vouches for them.
    found = {name: _describe(directory / name) for name in _list(directory)}
    for name in found:
        files.sync(directory / name)
    for folder in {(directory / name).parent for name in found} | {directory}:
        files.sync(folder)
    record = dataclasses.replace(record, files=found)
    sealed = _seal(json.dumps(dataclasses.asdict(record)))
    files.write_atomically(directory / RECORD, sealed.encode())


def read(directory: Path) -> Record:
    """The record of a checkpoint. Raises CheckpointError when it is damaged."""
    path = directory / RECORD
    try:
        content = path.read_text()
        text = content.partition("\n")[0]
        if content != _seal(text):
            raise ValueError("it has changed since it was written")
        return Record(**json.loads(text))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{directory.name}/{RECORD} is not readable: {error}") from error


def check_files(directory: Path, record: Record) -> None:
    """Raises CheckpointError, which names the file, unless all have the size and CRC of the
    record.
    """
    for name, (size, crc) in record.files.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{directory.name}/{name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{directory.name}/{name} has {file.stat().st_size} bytes instead of {size}"
            )
        if crc is not None and zlib.crc32(file.read_bytes()) != crc:
            raise CheckpointError(f"{directory.name}/{name} has changed since it was written")


def check_arrays(directory: Path, record: Record, restored: Mapping[str, jax.Array]) -> None:
    """Raises CheckpointError, which names them, if arrays are not the ones that were saved."""
    found = array_checksums(restored)
    if changed := sorted(name for name in found if found[name] != record.checksums.get(name)):
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise CheckpointError(
            f"{directory.name}: {', '.join(changed[:5])}{more} have changed since they were written"
        )


def best(records: Sequence[Record]) -> int | None:
    """The step with the highest score, the newest of equal ones; None when none has a score."""
    scored = [(record.score, record.step) for record in records if record.score is not None]
    return max(scored)[1] if scored else None


def surplus(folder: Path, keep: int) -> set[int]:
    """The committed checkpoints that are neither among the newest, nor the best, nor pinned."""
    committed = steps(folder)
    records = []
    for number in committed:
        with contextlib.suppress(CheckpointError):
            records.append(read(folder_of(folder, number)))
    return set(committed) - set(committed[-keep:]) - {best(records)} - set(pinned(folder))


def pinned(folder: Path) -> list[int]:
    """The steps whose checkpoints stay whatever else is kept. Raises CheckpointError when the file
    that says so is damaged.
    """
    path = folder / PINNED
    if not path.exists():
        return []
    content = path.read_text()
    text = content.partition("\n")[0]
    if content != _seal(text):
        raise CheckpointError(f"{path} is damaged: it has changed since it was written")
    return json.loads(text)


def pin(folder: Path, steps: Sequence[int]) -> None:
    """Says which checkpoints stay. Raises OSError."""
    files.write_atomically(folder / PINNED, _seal(json.dumps(sorted(steps))).encode())


@dataclasses.dataclass
class KeepCommitted(PreservationPolicy):
    """Policy of the checkpoints that Orbax keeps when it has written another one: the newest
    ``keep`` that have a record, the best, the pinned, and those without a record, which are being
    written.
    """

    folder: Path
    keep: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """As ``PreservationPolicy``."""
        deleted = surplus(self.folder, self.keep)
        return [info.step not in deleted for info in checkpoints]


def check_config(folder: Path, config: Any, may_change: Collection[str]) -> None:
    """Compares with the newest record that can be read."""
    for step in reversed(steps(folder)):
        try:
            stored = read(folder_of(folder, step)).config
        except CheckpointError:
            continue  # a damaged record is reported when it is restored
        read_config.check_same(stored, config, folder.parent, may_change)
        return


def lock(path: Path) -> int:
    """A descriptor that holds the workdir. Raises CheckpointError when another process does."""
    try:
        return files.lock(path)
    except OSError as error:
        busy = error.errno in (errno.EACCES, errno.EAGAIN)
        why = "another process is running in" if busy else "no lock can be had on"
        raise CheckpointError(f"{why} {path.parent.parent}: {error.strerror}") from error


def remove_incomplete(checkpoints: Path) -> None:
    """Deletes what a killed or failed save left: folders without a record. For one process."""
    for path in checkpoints.glob("step_*"):
        if path.is_dir() and not (path / RECORD).exists():
            shutil.rmtree(path, ignore_errors=True)


def remove(directory: Path) -> None:
    """Deletes a checkpoint, its record first, so that no record ever stands without its files."""
    (directory / RECORD).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def set_aside(directory: Path) -> None:
    """Renames a damaged checkpoint so that it neither counts nor is lost."""
    target = directory.with_name(f"damaged_{directory.name}")
    shutil.rmtree(target, ignore_errors=True)
    if directory.exists():
        directory.rename(target)


def _seal(text: str) -> str:
    """A line and its CRC-32."""
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n"


def _list(directory: Path) -> list[str]:
    return sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith(f".{RECORD}") and path.name != RECORD
    )


def _describe(path: Path) -> tuple[int, int | None]:
    """Size of a file and, if it is small, its CRC-32."""
    size = path.stat().st_size
    return size, zlib.crc32(path.read_bytes()) if size <= _SMALL_BYTES else None
