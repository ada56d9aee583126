"""Reading and writing the workspace from the session, while no process of the candidate is alive.

The candidate may have left anything there: links out of the workspace, pipes, directories of any
depth and mode. Only regular files that lie inside are touched. Runs inside the sandbox: standard
library only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping

MAX_DEPTH = 32
MAX_FILES = 2000


def write(root: str, files: Mapping[str, str]) -> None:
    """Writes each text at its path, making folders. Raises OSError (PermissionError for a path that
    leads out).
    """
    for path, text in files.items():
        if "/" in path:
            os.makedirs(os.path.dirname(_inside(root, path)), exist_ok=True)
        descriptor = os.open(
            _inside(root, path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "surrogatepass"))


def read(root: str, path: str, limit: int) -> str:
    """The text of a regular file. Raises OSError, or ValueError for one that is too long or not
    UTF-8.
    """
    target = _inside(root, path)
    if os.path.isdir(target):
        raise IsADirectoryError(f"{path} is a directory")
    descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a regular file")
        if status.st_size > limit:
            raise ValueError(f"{path} has {status.st_size} bytes; at most {limit} are read")
        try:
            return file.read(limit).decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
            ) from error


def paths(root: str) -> list[str]:
    """Paths of the regular files, sorted; at most MAX_FILES, none deeper than MAX_DEPTH."""
    return sorted(_walk(root))


def snapshot(root: str, limit: int) -> dict[str, str]:
    """Path -> text of the regular files that are readable UTF-8, shallow ones first, ``limit``
    bytes in all.
    """
    taken: dict[str, str] = {}
    for path in sorted(_walk(root), key=lambda path: (path.count("/"), path)):
        try:
            text = read(root, path, limit)
        except (OSError, ValueError):
            continue
        limit -= len(text.encode())
        taken[path] = text
    return dict(sorted(taken.items()))


def _inside(root: str, path: str) -> str:
    """Where ``path`` really leads. Raises PermissionError when that is outside ``root``."""
    target = os.path.realpath(os.path.join(root, path))
    if not target.startswith(root + "/"):
        raise PermissionError(f"{path} leads out of the workspace")
    return target


def _walk(root: str) -> Iterator[str]:
    found = 0
    pending = [("", 0)]
    while pending:
        folder, depth = pending.pop(0)
        try:
            entries = sorted(os.scandir(os.path.join(root, folder)), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                if depth < MAX_DEPTH and entry.name != "__pycache__":
                    pending.append((path, depth + 1))
            elif entry.is_file(follow_symlinks=False) and found < MAX_FILES and path.isprintable():
                found += 1
                yield path
