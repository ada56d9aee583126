"""Patches, applied and made by git without a working tree: on trees in a scratch repository.

The scratch repository sees the objects of other repositories and writes to none of them. A patch
comes from a file of tasks or from an agent, so it is not trusted: git refuses paths that lead out
of the repository or into ``.git``, and no hook, filter or setting of a user takes part.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from models.marks import encodable
from rl_code.environment.layers.repository import RepositoryError, git
from rl_code.environment.sandbox.snapshot import File, Snapshot

# Folders in which tools keep what they computed; a patch has nothing of them.
CACHES = frozenset({"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis"})
# Commits made here are the same on every machine.
_PERSON = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "tasks"),
        ("EMAIL", "tasks@localhost"),
        ("DATE", "2000-01-01T00:00:00+0000"),
    )
}
_EXECUTABLE = "100755"
_TEXT_MODES = {"100644", _EXECUTABLE}
_LINK = "120000"


class PatchError(ValueError):
    """A patch that git does not apply, or one that changes what cannot be a text."""


class Scratch:
    """An empty repository that sees the objects of others. A context manager that deletes it.

    sources: repositories, with or without a working tree, or folders of git's objects.
    """

    def __init__(self, sources: Sequence[Path] = ()):
        self.folder = Path(tempfile.mkdtemp(prefix="scratch-"))
        try:
            git(self.folder, "init", "--quiet", "--bare", "--template=")
            objects = [_objects(source) for source in sources]
            if objects:
                lines = "".join(f"{path}\n" for path in objects)
                (self.folder / "objects" / "info").mkdir(exist_ok=True)
                (self.folder / "objects" / "info" / "alternates").write_text(lines)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Deletes the repository."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def commit_id(self, name: str) -> str:
        """The full name of a commit. Raises RepositoryError where there is none."""
        try:
            full = git(self.folder, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        except RepositoryError as error:
            raise RepositoryError(f"the repository has no commit {name}") from error
        return full.decode().strip()

    def head_of(self, source: Path) -> str:
        """The full name of the commit that a repository has checked out."""
        return git(source, "rev-parse", "--verify", "--quiet", "HEAD^{commit}").decode().strip()

    def apply(self, tree: str, patch: str) -> str:
        """The tree that a patch makes of another; trees may be named by commits. Raises
        PatchError.
        """
        self._read(tree)
        # A text that lost its last newline on the way is a patch all the same.
        text = patch if patch.endswith("\n") else f"{patch}\n"
        if encodable(text) != text:
            raise PatchError("the patch is not valid Unicode")
        try:
            self._index("apply", "--cached", "--whitespace=nowarn", "-", given=text.encode())
        except RepositoryError as error:
            raise PatchError(f"git does not apply the patch: {_told(error)}") from error
        return self._write()

    def with_files(self, tree: str, files: Snapshot) -> str:
        """The tree with these files over it: the difference that a workspace handed in.

        What lies in ``.git`` and in caches of tools is left out, and so are empty folders, which
        git does not know.
        """
        self._read(tree)
        for path in sorted(files):
            parts = path.split("/")
            entry = files[path]
            # git refuses a path with such a part, wherever it stands
            if any(part.lower() == ".git" for part in parts) or not CACHES.isdisjoint(parts):
                continue
            kind = "file" if isinstance(entry, str) else entry.kind
            if kind in ("deleted", "replaced"):
                self._remove(path)
            elif kind in ("file", "link"):
                self._put(path, entry)
        return self._write()

    def changes(self, before: str, after: str) -> dict[str, str | None]:
        """Path -> text of the files that differ, None for one that is gone.

        Raises PatchError for a link, a submodule, and a file that is no text.
        """
        found: dict[str, str | None] = {}
        for _, mode, blob, path in self._differences(before, after):
            if mode == "000000":
                found[path] = None
            elif mode not in _TEXT_MODES:
                raise PatchError(f"{path} is a link or a submodule, not a file")
            else:
                found[path] = self._text(path, blob)
        return found

    def modes(self, before: str, after: str) -> dict[str, int]:
        """Path -> rights of the files that differ and may be executed in just one of two trees."""
        found = {}
        for old, mode, _, path in self._differences(before, after):
            if _EXECUTABLE in (old, mode) and old != mode and mode in _TEXT_MODES:
                found[path] = int(mode, 8) & 0o777
        return found

    def _differences(self, before: str, after: str) -> Iterator[tuple[str, str, str, str]]:
        """Mode before and after, the blob after, and the path of each file that differs."""
        listed = git(self.folder, "diff-tree", "-r", "-z", "--no-renames", before, after)
        fields = listed.decode(errors="surrogateescape").split("\0")[:-1]
        for told, path in zip(fields[::2], fields[1::2], strict=True):
            old, mode, _, blob, _ = told.removeprefix(":").split(" ")
            yield old, mode, blob, path

    def text(self, tree: str, path: str) -> str | None:
        """Text of a file of a tree; None where there is none. Raises PatchError for no text."""
        listed = git(self.folder, "ls-tree", "-z", tree, "--", path).decode()
        if not listed:
            return None
        mode, kind, blob = listed.split("\t")[0].split(" ")
        if kind != "blob" or mode == _LINK:
            raise PatchError(f"{path} is a folder, a link or a submodule, not a file")
        return self._text(path, blob)

    def paths(self, tree: str) -> list[str]:
        """Paths of all files of a tree, sorted."""
        listed = git(self.folder, "ls-tree", "-r", "-z", "--name-only", tree)
        return sorted(filter(None, listed.decode(errors="surrogateescape").split("\0")))

    def ignored(self, tree: str, paths: Sequence[str]) -> set[str]:
        """Paths, among those given, that git ignores by the files ``.gitignore`` of a tree."""
        rules = [path for path in self.paths(tree) if path.rpartition("/")[2] == ".gitignore"]
        if not rules or not paths:
            return set()
        with tempfile.TemporaryDirectory(prefix="ignored-") as folder:
            for path in rules:
                target = Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(git(self.folder, "cat-file", "blob", f"{tree}:{path}"))
            given = "".join(f"{path}\0" for path in paths).encode(errors="surrogateescape")
            where = (f"--git-dir={self.folder}", f"--work-tree={folder}", "-c", "core.bare=false")
            try:
                told = git(
                    Path(folder), *where, "check-ignore", "--no-index", "-z", "--stdin", given=given
                )
            except RepositoryError:  # which says that none is ignored
                return set()
        return set(filter(None, told.decode(errors="surrogateescape").split("\0")))

    def commit(self, tree: str, message: str, parents: Sequence[str] = ()) -> str:
        """Name of a commit of a tree, the same wherever it is made."""
        options = [word for parent in parents for word in ("-p", parent)]
        full = git(self.folder, "rev-parse", f"{tree}^{{tree}}").decode().strip()
        made = git(self.folder, "commit-tree", full, "-m", message, *options, **_PERSON)
        return made.decode().strip()

    def patch(self, before: str, after: str) -> str:
        """Patch with which ``git apply`` turns ``before`` into ``after``, binary files included; ""
        if they are the same.
        """
        options = ("--binary", "--full-index", "--no-renames", "--no-color", "--no-ext-diff")
        made = git(self.folder, "diff-tree", "-p", *options, before, after)
        # What is no UTF-8 cannot stand in JSON as it is: such a file goes as a binary one.
        try:
            return made.decode()
        except UnicodeDecodeError:
            attributes = self.folder / "info"
            attributes.mkdir(exist_ok=True)
            (attributes / "attributes").write_text("* binary\n")
            return git(self.folder, "diff-tree", "-p", *options, before, after).decode()

    def empty(self) -> str:
        """The tree of no files."""
        return git(self.folder, "mktree").decode().strip()

    def _text(self, path: str, blob: str) -> str:
        try:
            return git(self.folder, "cat-file", "blob", blob).decode()
        except UnicodeDecodeError as error:
            raise PatchError(f"{path} is no UTF-8 text") from error

    def _index(self, *arguments: str, given: bytes = b"") -> bytes:
        index = str(self.folder / "work.index")
        return git(self.folder, *arguments, given=given, GIT_INDEX_FILE=index)

    def _read(self, tree: str) -> None:
        self._index("read-tree", tree)

    def _write(self) -> str:
        return self._index("write-tree").decode().strip()

    def _remove(self, path: str) -> None:
        """Takes a file, or all that lies in a folder, out of the index."""
        # In a pathspec's magic the path is literal.
        listed = self._index("ls-files", "-z", "--", f":(literal){path}").split(b"\0")
        gone = b"".join(b"0 %s\t%s\0" % (b"0" * 40, name) for name in listed if name)
        if gone:
            self._index("update-index", "-z", "--index-info", given=gone)

    def _put(self, path: str, entry: str | File) -> None:
        """Puts a file or a link into the index, in place of whatever is at its path."""
        mode = "100644"
        content = entry.encode(errors="surrogatepass") if isinstance(entry, str) else entry.content
        if not isinstance(entry, str):
            mode = _LINK if entry.kind == "link" else "100755" if entry.mode & 0o100 else mode
        blob = git(self.folder, "hash-object", "-w", "--stdin", given=content).decode().strip()
        self._remove(path)
        line = f"{mode} {blob}\t{path}\0".encode(errors="surrogateescape")
        self._index("update-index", "-z", "--replace", "--index-info", given=line)


def _objects(source: Path) -> Path:
    """The folder of a repository's objects. Raises RepositoryError."""
    if source.name == "objects" and not (source / "HEAD").exists() and source.is_dir():
        return source.resolve()
    try:
        told = git(source, "rev-parse", "--path-format=absolute", "--git-path", "objects")
    except (RepositoryError, OSError) as error:
        raise RepositoryError(f"{source} is no git repository") from error
    return Path(told.decode().strip())


def _told(error: Exception) -> str:
    """Message of git, on one line."""
    return " ".join(str(error).partition("failed: ")[2].split()) or str(error)
