"""Files of each version in storage (a folder and a record), and the routes to a version.

    weights/v_00000012/full/<name>    the version's bits
    weights/v_00000012/delta/<name>   what changed since its base, the version published before it
    weights/v_00000012.json           the record: checksums, base, sizes

A version has one of the two folders or both. The record is written last and deleted first, so a
version without a record counts as never published.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_code.host import files
from rl_code.weights.versions import Version, WeightError

FOLDER = "weights"  # in the workdir
# What TensorStore and waits raise when files cannot be written or read; WeightError is a
# RuntimeError.
STORAGE_ERRORS = (OSError, ValueError, KeyError, RuntimeError)
_RECORD = re.compile(r"v_(\d{8,})\.json")


@dataclasses.dataclass(frozen=True)
class VersionRecord:
    """Record of a stored version."""

    version: Version
    # name of the learner that published it
    publisher: str
    # bytes of the files, compressed; 0 for what is not there
    full_bytes: int
    delta_bytes: int
    # number and checksum of the version that the change starts from; None without a change
    base: tuple[int, str] | None


@dataclasses.dataclass(frozen=True)
class Route:
    """A way to read a version: begin with a version in full, or with the one that the reader holds,
    and apply changes.
    """

    # the version that is read in full; None to start from the one that the reader holds
    full: int | None
    # the versions whose changes are applied, in order
    deltas: tuple[int, ...]
    # bytes to read
    full_bytes: int
    delta_bytes: int

    @property
    def length(self) -> int:
        """Bytes to read."""
        return self.full_bytes + self.delta_bytes

    @property
    def start(self) -> int:
        """Tells the routes to one version apart."""
        return -1 if self.full is None else self.full

    def folders(self, folder: Path) -> list[Path]:
        """The folders to read. The exclusive or of their bits is the version, or its difference
        from the version that is held.
        """
        whole = [] if self.full is None else [data_folder(folder, self.full) / "full"]
        return whole + [data_folder(folder, number) / "delta" for number in self.deltas]

    def __str__(self) -> str:
        start = "the version held" if self.full is None else f"version {self.full} in full"
        return f"{start}{''.join(f' + {number}' for number in self.deltas)}"


def data_folder(folder: Path, number: int) -> Path:
    """Folder of the arrays of a version."""
    return folder / f"v_{number:08d}"


def draft_folder(folder: Path, number: int) -> Path:
    """Their folder while they are written."""
    return folder / f".v_{number:08d}.draft"


def record_path(folder: Path, number: int) -> Path:
    """File of the record of a version."""
    return folder / f"v_{number:08d}.json"


def numbers(folder: Path) -> list[int]:
    """The versions that have a record, oldest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(number for name in names if (number := number_of(name)) is not None)


def number_of(name: str) -> int | None:
    """The version whose record has this file name, None for other files."""
    match = _RECORD.fullmatch(name)
    return int(match.group(1)) if match else None


def read_record(folder: Path, number: int) -> VersionRecord:
    """The record of a version; WeightError when there is none or it is damaged."""
    data = read_json(record_path(folder, number))
    base = None if data["base"] is None else tuple(data["base"])
    return VersionRecord(**{**data, "version": Version.from_json(data["version"]), "base": base})


def readable_record(folder: Path, number: int) -> VersionRecord | None:
    """The record of a version, None when there is none that can be read."""
    try:
        return read_record(folder, number)
    except WeightError:
        return None


def routes(folder: Path, record: VersionRecord, held: Version | None) -> list[Route]:
    """The routes to a version, the one that reads the least first.

    held: the version that the reader has already.
    """
    # Go back from change to change. Wherever the held version or one in full is met, a route ends.
    found: list[Route] = []
    deltas: tuple[int, ...] = ()
    length = 0
    node = (record.version.number, record.version.checksum)
    at = record
    while True:
        if held is not None and (held.number, held.checksum) == node:
            found.append(Route(None, deltas, 0, length))
        # deleted, or not the one that the delta was made from
        if at is None or at.version.checksum != node[1]:
            break
        if at.full_bytes:
            found.append(Route(node[0], deltas, at.full_bytes, length))
        if at.base is None:
            break
        deltas = (node[0], *deltas)
        length = length + at.delta_bytes
        node = at.base
        at = readable_record(folder, at.base[0])
    return sorted(found, key=lambda route: route.length)


def needed(records: Mapping[int, VersionRecord], keep: int) -> set[int]:
    """The newest versions and those without which they cannot be read."""
    found: set[int] = set()
    for number in sorted(records)[-keep:]:
        while number in records and number not in found:
            found.add(number)
            if not records[number].full_bytes and records[number].base is not None:
                number = records[number].base[0]
    return found


def commit(
    folder: Path,
    draft: Path,
    version: Version,
    publisher: str,
    base: Version | None,
    keep: int,
) -> VersionRecord:
    """Makes the version of a complete draft a stored one, and deletes what is not needed any more.

    It takes the place of damaged files of the same version. Their change stays: versions before
    may have to be made from it. If the process is killed in the middle of that, the version cannot
    be read; wrong bits are never left.
    """
    data = data_folder(folder, version.number)
    identity = None if base is None else (base.number, base.checksum)
    there = readable_record(folder, version.number)
    if identity is None and there is not None and (data / "delta").is_dir():
        os.replace(data / "delta", draft / "delta")
        identity = there.base
    # The order makes the version safe: first its files are on the disk, then they get their final
    # name, then the record says that they are there. Older versions are deleted last.
    for path in (*draft.glob("*/"), draft):  # what is below is synced when it is written
        files.sync(path)
    shutil.rmtree(data, ignore_errors=True)  # damaged, or of a commit that failed
    os.replace(draft, data)
    files.sync(folder)
    record = VersionRecord(version, publisher, size(data / "full"), size(data / "delta"), identity)
    content = dataclasses.asdict(dataclasses.replace(record, version=None))
    write_json(record_path(folder, version.number), content | {"version": version.to_json()})
    prune(folder, keep)
    return record


def prune(folder: Path, keep: int) -> None:
    """Deletes the versions that are not needed.

    A version's record is deleted before its files. Newer versions are deleted before older ones, so
    that a change is gone before the version from which it was made.
    """
    there = numbers(folder)
    readable = {number: record for number in there if (record := readable_record(folder, number))}
    kept = needed(readable, keep)
    for number in reversed(there):
        if number not in kept and (number in readable or number < min(kept)):
            record_path(folder, number).unlink(missing_ok=True)
            shutil.rmtree(data_folder(folder, number), ignore_errors=True)


def delete_incomplete(folder: Path) -> None:
    """Deletes what a killed or failed publication left."""
    complete = {data_folder(folder, number).name for number in numbers(folder)}
    for path in [*folder.glob("v_*"), *folder.glob(".v_*")]:
        if path.is_dir() and path.name not in complete:
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix == files.PARTIAL:
            path.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Writes a small file, with its CRC, atomically and to the disk. One process or thread at a
    time may write one path. Raises OSError.
    """
    files.write_atomically(path, encode(data))


def encode(data: Any) -> bytes:
    """The content of a file that ``read_json`` reads: JSON and its CRC."""
    text = json.dumps(data, sort_keys=True)
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode()


def read_json(path: Path) -> Any:
    """The value that ``write_json`` wrote; WeightError when it is missing or damaged."""
    try:
        text, crc = path.read_text().splitlines()
        if f"{zlib.crc32(text.encode()):08x}" != crc:
            raise ValueError("its content does not match its CRC")
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise WeightError(f"{path} cannot be read: {error}") from error


def size(folder: Path) -> int:
    """Bytes of all files in a folder, 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
