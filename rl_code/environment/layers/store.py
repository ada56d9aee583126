"""The layer store: read-only folders that sandboxes share, each named by its content.

    <store>/<digest>/tree           what sandboxes see
    <store>/<digest>/manifest.json  how it was made, and how large it is
    <store>/made/<recipe>           digest of the layer that a recipe has given

The digest is that of the names, kinds, rights and contents in the tree, not of times or owners. A
layer is built beside its place and renamed to it, so a folder with a digest as its name is always
whole, and of two processes that build the same layer one keeps its own and the other throws its
away. Nothing in the store is changed afterwards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# The mark of a folder that hides what lower layers have at its path, as overlayfs reads it.
OPAQUE = "user.overlay.opaque"
_TREE = "tree"
_MANIFEST = "manifest.json"
_MADE = "made"
_CHUNK = 1 << 20
# Compiled modules of Python 3.7 and later begin with a number of the version, in this range, flags,
# and the time and the length of their source (PEP 552).
_PYC = struct.Struct("<H2sIII")
_PYC_VERSIONS = range(3390, 10_000)


class MissingLayer(LookupError):
    """The store has no such layer."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Description of a layer."""

    digest: str
    # Recipe: "kind", and the entries with which that kind can make the layer again.
    recipe: Mapping[str, Any]
    # Files, links and folders, and the bytes of all files.
    entries: int
    bytes: int


class LayerStore:
    """The layers in a folder. Safe for many processes at once.

    folder: made if it is missing. Raises OSError where it cannot be.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / _MADE).mkdir(exist_ok=True)

    def tree(self, digest: str) -> str:
        """The folder of a layer, relative to the store. Raises MissingLayer."""
        name = f"{digest.removeprefix('sha256:')}/{_TREE}"
        if not (self.folder / name).is_dir():
            raise MissingLayer(
                f"the layer {digest} is not in the layer store {self.folder}; build it there "
                "again, or name the store that has it as sandbox.layers"
            )
        return name

    def manifest(self, digest: str) -> Manifest:
        """Description of a layer. Raises MissingLayer."""
        path = (self.folder / self.tree(digest)).with_name(_MANIFEST)
        return Manifest(**json.loads(path.read_text()))

    def verify(self, digest: str) -> None:
        """Reads a whole layer. Raises ValueError if its content is another, or MissingLayer."""
        found, _, _ = digest_of(self.folder / self.tree(digest))
        if found != digest:
            raise ValueError(f"the layer {digest} in {self.folder} was changed: it is {found}")

    def build(self, recipe: Mapping[str, Any], fill: Callable[[Path], None]) -> str:
        """The digest of the layer that a recipe gives; it is built if this has not been done yet.

        recipe: names everything that the content depends on, as JSON. fill: puts the content into
        an empty folder, and may raise what it likes; nothing is kept then. Raises OSError for a
        full disk.
        """
        text = json.dumps(recipe, sort_keys=True)
        made = self.folder / _MADE / hashlib.sha256(text.encode()).hexdigest()
        try:
            digest = made.read_text()
            self.tree(digest)
            return digest
        except (FileNotFoundError, MissingLayer):
            pass
        work = Path(tempfile.mkdtemp(prefix="building-", dir=self.folder))
        try:
            tree = work / _TREE
            tree.mkdir()
            fill(tree)
            _normalise(tree)
            digest, entries, size = digest_of(tree)
            manifest = Manifest(digest, dict(recipe), entries, size)
            (work / _MANIFEST).write_text(json.dumps(dataclasses.asdict(manifest), indent=1))
            work.chmod(0o755)
            os.sync()  # what has a digest as its name is whole, also after a crash
            self._place(work, digest)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        # Several processes may say so at once, each with a file of its own.
        descriptor, name = tempfile.mkstemp(dir=made.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(digest)
            os.fsync(descriptor)
        os.replace(name, made)
        return digest

    def _place(self, work: Path, digest: str) -> None:
        """Gives a layer its name, unless another process has built it meanwhile."""
        place = self.folder / digest.removeprefix("sha256:")
        try:
            work.rename(place)
        except OSError:
            if not place.is_dir():
                raise


def digest_of(tree: Path) -> tuple[str, int, int]:
    """Digest of a tree, the number of its entries, and the bytes of its files."""
    total = hashlib.sha256()
    entries = 0
    size = 0
    for path, status in _walk(tree):
        kind, content = _content(path, status)
        name = path.relative_to(tree).as_posix()
        fields = (os.fsencode(name), kind, f"{stat.S_IMODE(status.st_mode):o}".encode(), content)
        for field in fields:
            total.update(len(field).to_bytes(8, "little") + field)
        entries += 1
        size += status.st_size if kind == b"file" else 0
    return f"sha256:{total.hexdigest()}", entries, size


def _content(path: Path, status: os.stat_result) -> tuple[bytes, bytes]:
    """Kind of an entry, and what its content is: a hash of a file's."""
    mode = status.st_mode
    if stat.S_ISLNK(mode):
        return b"link", os.readlink(os.fsencode(path))
    if stat.S_ISDIR(mode):
        try:
            return b"folder", os.getxattr(path, OPAQUE)
        except OSError:
            return b"folder", b""
    if stat.S_ISCHR(mode) and status.st_rdev == 0:
        return b"deleted", b""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return b"file", digest.digest()


def _normalise(tree: Path) -> None:
    """Takes away what a layer must not depend on or hold: times, rights beyond those of read, write
    and execute, and everything but files, links, folders and whiteouts.

    The owner may read and write everything, as the overlay needs it. Compiled modules that belong
    to their sources still do afterwards.
    """
    for path in tree.rglob("*.pyc"):
        _without_time(path)
    tree.chmod(0o755)
    for path, status in _walk(tree):
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            path.chmod(mode & 0o777 | 0o700)
        elif stat.S_ISREG(status.st_mode):
            path.chmod(mode & 0o777 | 0o600)
        elif not stat.S_ISLNK(status.st_mode) and status.st_rdev:
            path.unlink()  # a device
            continue
        elif stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
            path.unlink()
            continue
        os.utime(path, (0, 0), follow_symlinks=False)


def _without_time(path: Path) -> None:
    """Gives a compiled module the time that its source will have, if it was made from that source.

    With another time than its source it would never be read: each program would compile it anew.
    """
    folder = path.parent.parent if path.parent.name == "__pycache__" else path.parent
    source = folder / f"{path.name.partition('.')[0]}.py"
    if path.is_symlink() or not path.is_file() or source.is_symlink() or not source.is_file():
        return
    path.chmod(path.stat().st_mode | 0o600)
    with open(path, "r+b") as file:
        head = file.read(_PYC.size)
        if len(head) < _PYC.size:
            return
        version, end, flags, time, length = _PYC.unpack(head)
        status = source.stat()
        made_from = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
        if (
            version in _PYC_VERSIONS
            and end == b"\r\n"
            and flags == 0
            and (time, length) == made_from
        ):
            file.seek(0)
            file.write(_PYC.pack(version, end, flags, 0, length))


def _walk(tree: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything in a tree, each folder before what lies in it, by name."""
    with os.scandir(tree) as found:
        entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        path = Path(entry.path)
        yield path, entry.stat(follow_symlinks=False)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path)
