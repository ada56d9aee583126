"""Writes files so that nobody ever sees half of one, not even after a crash or a loss of power.

A file is first written under a temporary name and then given its own name in one step. ``fsync``
before that step makes the content reach the disk before the name does; ``fsync`` on the folder
makes the name reach the disk too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)  # the error numbers of a full disk and of a full quota
_PRIVATE = 0o600  # the rights of a file that nobody else may read
PARTIAL = ".partial"  # how the name of a file that ``write_atomically`` is writing ends


def make_private(path: Path) -> None:
    """Makes a file that only its owner may read and write, or takes the rights of others from one
    that is there. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, _PRIVATE)
    try:
        if os.fstat(descriptor).st_mode & 0o077:
            with contextlib.suppress(PermissionError):  # it is somebody else's
                os.fchmod(descriptor, _PRIVATE)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Forces the content of a file, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Writes a file so that readers see the old content or all of the new, never a part.

    The new content is on the disk when this returns. One process at a time may write one path.
    private: whether nobody else may read it. Raises OSError, leaving the old content, when the disk
    is full.
    """
    partial = path.with_name(f".{path.name}{PARTIAL}")
    with explain_full_disk(path):
        try:
            partial.unlink(missing_ok=True)  # of a process that was killed
            _write(partial, data, synced=True, private=private)
            os.replace(partial, path)
        except OSError:
            # What cannot be deleted now is replaced by the next write.
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_once(
    path: Path, data: bytes, aside: Path, *, synced: bool = True, private: bool = False
) -> bool:
    """Gives ``path`` its content; returns False and changes nothing when it has one already.

    The content is written aside and then linked to its name: link(2) fails when the name exists,
    on a local disk and on NFS, so exactly one of several writers wins.

    Args:
      aside: where to write first: a name on the same file system that nobody else uses. It is gone
        afterwards.
      synced: whether the file must survive a loss of power once this returns. It survives a killed
        process either way.
      private: whether nobody else may read it.

    Raises OSError.
    """
    try:
        _write(aside, data, synced, private)
        return link_once(aside, path, synced=synced)
    finally:
        # Also of a file that could not be written. What cannot be deleted now is deleted when its
        # writer starts again.
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def link_once(aside: Path, path: Path, *, synced: bool = True) -> bool:
    """Gives a file that was written aside its name; as ``write_once``, which writes it too."""
    try:
        linked = _link(aside, path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    if linked and synced:
        sync(path.parent)
    return linked


def replace(path: Path, data: bytes, aside: Path) -> None:
    """Replaces a file that may be lost with the power, as a heartbeat may; readers see the old
    content or the new.

    aside: as in ``write_once``. Raises OSError.
    """
    try:
        _write(aside, data, synced=False)
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Gives the OSError of a full disk a message that says so and names ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            message = "the disk is full; free some space and start the same command again"
            raise OSError(error.errno, message, path) from error
        raise


def lock(path: Path) -> int:
    """Takes a lock that ends with this process; returns the descriptor that holds it.

    Raises OSError: with EACCES or EAGAIN when another process has it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def free_mib(path: Path) -> float | None:
    """Free space in MiB where ``path`` is or would be; None when nobody can say."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free / 2**20
    return None


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, _PRIVATE)


def _write(path: Path, data: bytes, synced: bool, private: bool = False) -> None:
    opener = _open_private if private else None
    with open(path, "xb", opener=opener) as file:
        file.write(data)
        if synced:
            file.flush()
            os.fsync(file.fileno())


def _link(aside: Path, path: Path) -> bool:
    try:
        os.link(aside, path)
    except FileExistsError:
        # Over a network the answer to a link that was made can get lost; the client then repeats
        # the request, and the repeated one fails.
        return os.path.samefile(aside, path)
    return True
