"""The layer of a repository that is made up: its commits are given as texts.

Who committed and when is made up too, the same for all. So a commit's name follows from the texts,
and is known without git (``names``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_code.environment.layers import repository
from rl_code.environment.layers.store import LayerStore

_WHO = "dev <dev@localhost>"
_FIRST_S = 1_700_000_000  # of the first commit, seconds since 1970
_BETWEEN_S = 86_400


@dataclasses.dataclass(frozen=True)
class Commit:
    """A state of all files, none of which lies in a folder."""

    subject: str
    # Path -> text.
    files: Mapping[str, str]

    def __post_init__(self) -> None:
        inside = [path for path in self.files if "/" in path]
        if inside or not self.files:
            raise ValueError(f"a commit needs files that lie in no folder, not {inside}")


def build(store: LayerStore, commits: Sequence[Commit]) -> str:
    """Digest of the layer that has the last of these commits, and the others as its ancestors. A
    layer that is there already needs no git.

    Raises RepositoryError.
    """
    last = names(commits)[-1]

    def fill(tree: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            repository.git(Path(folder), "init", "--quiet", "--bare", "--template=")
            repository.git(Path(folder), "fast-import", "--quiet", given=_stream(commits))
            repository.fill(tree, Path(folder), last)

    return store.build(repository.recipe(last), fill)


def names(commits: Sequence[Commit]) -> list[str]:
    """Names of the commits, 40 hexadecimal digits each: git's SHA-1 of trees and of who, when and
    what.
    """
    found: list[str] = []
    for number, commit in enumerate(commits):
        entries = (
            b"100644 " + path.encode() + b"\0" + _digest("blob", text.encode())
            for path, text in sorted(commit.files.items(), key=lambda one: one[0].encode())
        )
        lines = [
            f"tree {_digest('tree', b''.join(entries)).hex()}",
            *(f"parent {name}" for name in found[-1:]),
            f"author {_signed(number)}",
            f"committer {_signed(number)}",
            "",
            _message(commit),
        ]
        found.append(_digest("commit", "\n".join(lines).encode()).hex())
    return found


def _digest(kind: str, content: bytes) -> bytes:
    """The name of an object of git."""
    heading = f"{kind} {len(content)}\0".encode()
    return hashlib.sha1(heading + content, usedforsecurity=False).digest()


def _signed(number: int) -> str:
    return f"{_WHO} {_FIRST_S + number * _BETWEEN_S} +0000"


def _message(commit: Commit) -> str:
    return f"{commit.subject}\n"


def _stream(commits: Sequence[Commit]) -> bytes:
    """The commits as ``git fast-import`` reads them."""
    parts: list[bytes] = []
    for number, commit in enumerate(commits):
        parts += [
            f"commit refs/heads/{repository.BRANCH}\ncommitter {_signed(number)}\n".encode(),
            _data(_message(commit)),
            b"deleteall\n",
        ]
        for path, text in commit.files.items():
            parts += [f"M 100644 inline {path}\n".encode(), _data(text)]
    return b"".join(parts)


def _data(text: str) -> bytes:
    content = text.encode()
    return b"data %d\n%s\n" % (len(content), content)
