"""The files of a workspace as plain data: what an agent hands in and a grader starts from.

A snapshot is a dict from path to entry. The entry of a text file with the usual rights is its text,
so the files of a task are a snapshot, too. Every other entry is a ``File``. Folders follow from the
paths of their files; only empty folders are entries. In a world of layers a snapshot is the
difference from them, so it may say of a path that it is deleted, or replaced by a new folder.
Python's bytecode is left out: bytecode that a
candidate wrote would be run instead of the source that is shown, and Python makes it again.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from rl_code.environment.sandbox.inside.files import TEXT_MODE


@dataclasses.dataclass(frozen=True)
class File:
    """A file that is binary or has other rights than a text file usually has, a link, an empty
    folder, or what became of a path of the layers below the workspace.
    """

    # The path it leads to, for a link; nothing for a folder.
    content: bytes
    # The rights as chmod takes them; those of links and folders are not kept.
    mode: int = TEXT_MODE
    kind: Literal["file", "link", "folder", "deleted", "replaced"] = "file"


Snapshot = Mapping[str, str | File]


def texts(snapshot: Snapshot) -> dict[str, str]:
    """The files that are text, whatever their rights; binary files, links and empty folders
    are left out."""
    found = {}
    for path, entry in snapshot.items():
        if isinstance(entry, str):
            found[path] = entry
        elif entry.kind == "file":
            try:
                found[path] = entry.content.decode()
            except UnicodeDecodeError:
                continue
    return found


def folders_of(path: str) -> list[str]:
    """The folders that a path lies in, the outermost first."""
    return [path[:at] for at, letter in enumerate(path) if letter == "/"]


def to_session(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as the session reads it (inside/files.py)."""
    return {
        path: entry
        if isinstance(entry, str)
        else {
            "content": base64.b64encode(entry.content).decode(),
            "mode": entry.mode,
            "kind": entry.kind,
        }
        for path, entry in snapshot.items()
    }


def from_session(entries: Mapping[str, Any]) -> dict[str, str | File]:
    """A snapshot from what the session wrote. Raises ValueError, KeyError or TypeError for what is
    none.
    """
    return {path: _entry(entry) for path, entry in entries.items()}


def _entry(record: Mapping[str, Any]) -> str | File:
    file = File(base64.b64decode(record["content"]), record["mode"], record["kind"])
    if (file.kind, file.mode) == ("file", TEXT_MODE):
        try:
            return file.content.decode()
        except UnicodeDecodeError:
            return file
    return file
