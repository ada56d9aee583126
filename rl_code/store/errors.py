"""The error of the store, and how errors of the file system become one."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from rl_code.host import files


class StoreError(RuntimeError):
    """The store cannot be written or read, or what it holds is not what it should; the message
    names the file.
    """


class ConsumedOtherwise(StoreError):
    """A step that is consumed came out with other groups or other weights."""


@contextlib.contextmanager
def explain(action: str, path: Path) -> Iterator[None]:
    """Turns an OSError into a StoreError: "could not <action> <path>", why, and how much space
    there is.
    """
    try:
        yield
    except OSError as error:
        free = files.free_mib(path.parent)
        space = "free space unknown" if free is None else f"{free:.1f} MiB free"
        raise StoreError(f"could not {action} {path}: {_reason(error)} ({space})") from error


def _reason(error: OSError) -> str:
    if error.errno in files.FULL:
        return "the disk is full"
    if error.errno == errno.ENOENT:
        return "there is no such file or folder; was the store deleted or unmounted?"
    return error.strerror or str(error)
