"""Files on storage that several machines share: each appears whole or not at all, and most are
written once.

A file is written aside, under a name that only its writer uses, and then linked to its own name:
link(2) fails when the name exists, on a local disk and on NFS, so of several writers exactly one
wins, and a writer that is killed leaves nothing under the name. Small files are one line, a
checksum and JSON, so that damage in them is noticed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)


class StoreError(RuntimeError):
    """The store cannot be written or read, or what it holds is not what it should; the message
    names the file.
    """


@contextlib.contextmanager
def explain(action: str, path: Path) -> Iterator[None]:
    """Turns an OSError into a StoreError: "could not <action> <path>", why, and how much space
    there is.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(f"could not {action} {path}: {_reason(error)} ({_free(path)})") from error


def publish(path: Path, data: bytes, aside: Path, *, sync: bool = True) -> bool:
    """Gives ``path`` its content, or returns False and changes nothing when it has one.

    aside: where to write first, a name on the same file system that nobody else uses; it is gone
    afterwards. sync: whether the file must survive the loss of power once this returns. It survives
    a killed process either way. Raises OSError.
    """
    try:
        _write(aside, data, sync)
        linked = _link(aside, path)
    finally:
        # what cannot be deleted now is deleted when its writer starts again
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    if linked and sync:
        sync_folder(path.parent)
    return linked


def replace(path: Path, data: bytes, aside: Path) -> None:
    """Replaces the content of ``path``; readers see the old or the new. Raises OSError."""
    try:
        _write(aside, data, sync=False)
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive the loss of power. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(content: Any) -> bytes:
    """A line of JSON behind its checksum."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def unseal(data: bytes, path: Path) -> Any:
    """The content of what ``seal`` wrote. Raises StoreError, naming ``path``, when a byte of it has
    changed.
    """
    checksum = data[:8]
    text = data[9:-1]
    if data != b"%08x %s\n" % (zlib.crc32(text), text):
        raise StoreError(
            f"{path} is damaged: its checksum is {checksum!r}, its content has "
            f"{zlib.crc32(text):08x}"
        )
    return json.loads(text)


def _write(path: Path, data: bytes, sync: bool) -> None:
    with open(path, "xb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def _link(aside: Path, path: Path) -> bool:
    try:
        os.link(aside, path)
    except FileExistsError:
        # Over a network the answer to a link that was made can get lost, and the repeated request
        # then fails.
        return os.path.samefile(aside, path)
    return True


def _reason(error: OSError) -> str:
    if error.errno in _FULL:
        return "the disk is full"
    if error.errno == errno.ENOENT:
        return "there is no such file or folder; was the store deleted or unmounted?"
    return error.strerror or str(error)


def _free(path: Path) -> str:
    for folder in path.parents:
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB free"
    return "free space unknown"
