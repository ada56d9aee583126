"""The difference of a workspace from its layers: taken from the overlay, and laid over the layers
again.

The overlay keeps what was changed in a folder of its own (its upper folder): new and changed files
whole, a device 0/0 (whiteout) for what was deleted, and a mark on a folder that hides everything
the layers have at its path. Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from . import files

# The mark that overlayfs sets on a folder, when it is mounted by a user.
_OPAQUE = "user.overlay.opaque"


def changed(changes: str, below: str, root: str) -> Iterator[files.Found]:
    """Entries that differ from the layers, by path; a folder comes before its entries.

    changes: the upper folder of the overlay; it may be missing. below: the layers alone. root: the
    workspace.
    """
    # Folders, and whether the layers show through there.
    pending = [("", True)] if os.path.isdir(changes) else []
    for folder, shows in pending:
        # Through the overlay, which remembers the rights.
        files.enter(os.path.join(root, folder))
        upper = os.path.join(changes, folder)
        with os.scandir(upper) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        entries = [entry for entry in entries if entry.name != files.BYTECODE]
        if folder and shows and os.path.lexists(os.path.join(below, folder)):
            shows = not _hides(upper)
            if not shows:
                yield folder, None, files.REPLACED
        elif folder and not entries:
            yield folder, None, files.FOLDER
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                yield path, None, files.DELETED
            elif not stat.S_ISDIR(status.st_mode) or path.count("/") > files.MAX_DEPTH:
                yield path, os.path.join(root, path), files.FILE
            else:
                pending.append((path, shows))


def restore(root: str, entries: Mapping[str, Any]) -> None:
    """Lays entries of a snapshot over the layers of a workspace: each path is afterwards what its
    entry says, whatever the layers have there.

    Raises OSError (PermissionError for a path through a link), or ValueError for one in too many
    folders.
    """
    for path in sorted(entries):  # a folder before what lies in it
        files.check_depth(path)
        entry = entries[path]
        target = os.path.join(_folder(root, os.path.dirname(path)), os.path.basename(path))
        if isinstance(entry, str):
            _put(target, entry.encode("utf-8", "surrogatepass"), files.TEXT_MODE)
            continue
        kind = entry["kind"]
        content = base64.b64decode(entry["content"])
        if kind == files.FILE:
            _put(target, content, entry["mode"])
            continue
        if kind != files.FOLDER or not stat.S_ISDIR(_mode(target)):
            _remove(target)
        if kind == files.LINK:
            os.symlink(content, target)
        elif kind != files.DELETED and not os.path.isdir(target):
            os.mkdir(target, 0o755)


def _hides(folder: str) -> bool:
    """True if a folder of the changes hides the layers' entries at its path."""
    try:
        return os.getxattr(folder, _OPAQUE) == b"y"
    except OSError:  # it has no such mark
        return False


def _folder(root: str, path: str) -> str:
    """The folder at ``path``, made if it is missing. Raises PermissionError for a link on the
    way: where it leads is not known here.
    """
    at = root
    for part in filter(None, path.split("/")):
        at = os.path.join(at, part)
        mode = _mode(at)
        if not mode:
            os.mkdir(at, 0o755)
        elif not stat.S_ISDIR(mode):
            raise PermissionError(f"{path} leads through something that is no folder")
    return at


def _put(target: str, data: bytes, mode: int) -> None:
    """Makes ``target`` a file with this content and these rights."""
    if not stat.S_ISREG(_mode(target)):
        _remove(target)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    descriptor = os.open(target, flags, files.TEXT_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        os.fchmod(descriptor, mode)


def _remove(target: str) -> None:
    """Removes whatever is at ``target``, if anything is."""
    mode = _mode(target)
    if not stat.S_ISDIR(mode):
        if mode:
            os.unlink(target)
        return
    for name in os.listdir(target):
        _remove(os.path.join(target, name))
    os.rmdir(target)


def _mode(target: str) -> int:
    """Kind and rights of the entry at a path, links not followed; 0 for none."""
    try:
        return os.lstat(target).st_mode
    except FileNotFoundError:
        return 0
