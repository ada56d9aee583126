"""Reading and writing the workspace from the session, while no process of the candidate is alive.

The candidate may have left anything there: links out of the workspace, pipes, folders of any depth
and with any rights. Nothing outside is touched, and what a snapshot cannot hold is an error with
its name. Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Folders that a path may lie in.
MAX_DEPTH = 32
# Files that are listed, and characters of a path and of all paths that are.
MAX_LISTED = 50_000
MAX_LISTED_LENGTH = 1000
_ALL_LISTED_LENGTH = 4_000_000
# Python makes it anew, and one that a candidate wrote would be run instead of its source.
BYTECODE = "__pycache__"
TEXT_MODE = 0o644
FILE, LINK, FOLDER = "file", "link", "folder"
# In the difference from layers (difference.py): a path that is gone, and a folder that hides what
# the layers have there.
DELETED, REPLACED = "deleted", "replaced"

# A path, where its content is (None for what has none), and its kind; FILE for links, too.
Found = tuple[str, str | None, str]


def write(root: str, files: Mapping[str, Any]) -> None:
    """Writes each entry at its path, making folders.

    An entry is a text or ``{"content": base64, "mode": int, "kind": FILE, LINK or FOLDER}``. Raises
    OSError (PermissionError for a path that leads out), or ValueError for one in too many folders.
    """
    links = {}
    for path, entry in files.items():
        check_depth(path)
        if isinstance(entry, str):
            _write_file(root, path, entry.encode("utf-8", "surrogatepass"), None)
        elif entry["kind"] == LINK:
            links[path] = base64.b64decode(entry["content"])
        elif entry["kind"] == FOLDER:
            os.makedirs(_inside(root, path), exist_ok=True)
        else:
            _write_file(root, path, base64.b64decode(entry["content"]), entry["mode"])
    # After all files, none of which is meant to be written through a link.
    for path, target in links.items():
        _make_folder(root, path)
        os.symlink(target, os.path.join(root, path))


def _write_file(root: str, path: str, data: bytes, mode: int | None) -> None:
    """Writes one file; mode None keeps the rights of a file that exists."""
    _make_folder(root, path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    descriptor = os.open(_inside(root, path), flags, TEXT_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        if mode is not None:
            os.fchmod(descriptor, mode)


def _make_folder(root: str, path: str) -> None:
    if "/" in path:
        os.makedirs(os.path.dirname(_inside(root, path)), exist_ok=True)


def check_depth(path: str) -> None:
    """Raises ValueError for a path in too many folders."""
    if path.count("/") > MAX_DEPTH:
        raise ValueError(f"{_short(path)} lies in more than {MAX_DEPTH} folders")


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


def paths(root: str, below: str = "") -> list[str]:
    """Paths of the regular files, sorted; at most MAX_LISTED, no long ones, none in more than
    MAX_DEPTH folders, and only those whose names can be printed.

    below: a folder, of which alone they are, or the path of a file; no link is followed.
    """
    at = ""
    for name in below.split("/") if below else ():
        at = f"{at}/{name}" if at else name
        full = os.path.join(root, at)
        if at == below and os.path.isfile(full) and not os.path.islink(full):
            return [below]
        if not os.path.isdir(full) or os.path.islink(full):
            return []
    found: list[str] = []
    left = _ALL_LISTED_LENGTH
    for path, entry in _walk(root, below):
        short = path.count("/") <= MAX_DEPTH and len(path) <= MAX_LISTED_LENGTH
        in_reach = short and path.isprintable()
        if in_reach and entry is not None and entry.is_file(follow_symlinks=False):
            left -= len(path)
            if len(found) == MAX_LISTED or left < 0:
                break
            found.append(path)
    return sorted(found)


def everything(root: str) -> Iterator[Found]:
    """All files, links and empty folders of a workspace."""
    for path, entry in _walk(root):
        yield (path, None, FOLDER) if entry is None else (path, entry.path, FILE)


def snapshot(found: Iterable[Found], limit_bytes: int, limit_files: int) -> dict[str, Any]:
    """Entries that were found, sorted by path, as ``write`` takes them, but with the content of
    text files in base64, too: escaped, it could be six times as long as the limit.

    Raises ValueError that names what the snapshot cannot hold: more files or bytes than the limits,
    a path in too many folders, a name that cannot be printed, a pipe, a socket or a device.
    """
    taken: dict[str, Any] = {}
    size = 0
    for path, full, kind in found:
        if not path.isprintable():
            raise ValueError(f"the file name {_short(path)} holds characters that do not print")
        check_depth(path)
        if len(taken) == limit_files:
            raise ValueError(f"the workspace holds more than {limit_files} files")
        size += len(path)
        if full is None:
            taken[path] = _record(b"", 0o755, kind)
            continue
        status = os.lstat(full)
        size += status.st_size
        if size > limit_bytes:
            raise ValueError(f"the workspace holds more than {limit_bytes} bytes")
        taken[path] = _entry(full, path, status)
    return dict(sorted(taken.items()))


def _entry(full: str, path: str, status: os.stat_result) -> Any:
    """One file or link as ``write`` takes it."""
    if stat.S_ISLNK(status.st_mode):
        return _record(os.readlink(os.fsencode(full)), 0o777, LINK)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is neither a file nor a folder nor a link")
    mode = stat.S_IMODE(status.st_mode)
    readable = mode & stat.S_IRUSR
    if not readable:
        os.chmod(full, mode | stat.S_IRUSR)
    with open(full, "rb") as file:
        data = file.read(status.st_size)
    if not readable:
        os.chmod(full, mode)
    return _record(data, mode, FILE)


def _record(data: bytes, mode: int, kind: str) -> dict[str, Any]:
    return {"content": base64.b64encode(data).decode(), "mode": mode, "kind": kind}


def _inside(root: str, path: str) -> str:
    """Place to which ``path`` really leads. Raises PermissionError when it is outside ``root``."""
    target = os.path.realpath(os.path.join(root, path))
    if not target.startswith(root + "/"):
        raise PermissionError(f"{path} leads out of the workspace")
    return target


def enter(folder: str) -> None:
    """Gives back the rights to a folder that the candidate has taken away from itself, for good:
    a snapshot does not keep them.
    """
    # In an overlay every change of rights makes a copy of the folder.
    if os.stat(folder).st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(folder, 0o755)


def _walk(root: str, below: str = "") -> Iterator[tuple[str, os.DirEntry[str] | None]]:
    """Everything in a folder but folders, by path, shallow ones first; None for an empty folder. A
    folder in too many others is given as it is, so that the caller sees that there is more.
    """
    pending = [below]
    for folder in pending:
        full = os.path.join(root, folder)
        enter(full)
        with os.scandir(full) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        entries = [entry for entry in entries if entry.name != BYTECODE]
        if folder and not entries:
            yield folder, None
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if not entry.is_dir(follow_symlinks=False) or path.count("/") > MAX_DEPTH:
                yield path, entry
            else:
                pending.append(path)


def _short(path: str) -> str:
    """The path in ASCII, cut: it may be long and hold anything."""
    text = ascii(path)
    return text if len(text) <= 80 else f"{text[:40]}...{text[-37:]}"
