"""Rows of one's own with a suite of pytest, on a repository at a commit or on files.

``records.COLUMNS`` has the columns. The repository becomes a layer whose history ends at the
commit, as in the other formats of repositories.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rl_code.environment.layers.repository import RepositoryError
from rl_code.environment.layers.store import LayerStore
from rl_code.tasks.patches import PatchError, Scratch
from rl_code.tasks.records import read_world
from rl_code.tasks.row_files import malformed
from rl_code.tasks.swe_rows import read_ids, read_object
from rl_code.tasks.worlds import NoWorld, Places, bare, repository_layer
from rl_code.types import Suite, Task, Tests, World


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row, and where it stands."""

    file: Path
    line: int
    # Field of ``records.COLUMNS`` -> what the row has, and the column that it has it in.
    fields: Mapping[str, Any]
    columns: Mapping[str, str]

    def wrong(self, field: str, expected: str, found: str) -> NoReturn:
        """Raises the TaskFileError for a field."""
        malformed(self.file, self.line, self.columns.get(field, field), expected, found)

    def read(self, reader: Callable[..., Any], field: str) -> Any:
        """Value of a field, read by one of ``swe_rows``' readers."""
        cells = {self.columns[name]: value for name, value in self.fields.items()}
        return reader(self.file, self.line, cells, self.columns[field])

    def texts(self, field: str, texts: Mapping[str, Any]) -> dict[str, str | None]:
        """Path -> text of a field; None stands for no file."""
        for path, text in texts.items():
            if not isinstance(text, str | None):
                self.wrong(field, f"a text of {path}", repr(text)[:80])
        return dict(texts)


def make(
    file: Path,
    line: int,
    fields: Mapping[str, Any],
    columns: Mapping[str, str],
    *,
    places: Places,
    store: Callable[[], LayerStore],
) -> Task:
    """The task of a row.

    fields: field of ``records.COLUMNS`` -> what the row has. columns: field -> the file's column.
    store: gives the layer store, and raises where there is none. Raises TaskFileError naming file,
    line and column.
    """
    row = _Row(file, line, fields, columns)
    suite = _suite(row)
    # Parquet has a value for every path that another row has.
    texts = row.texts("files", fields.get("files") or {})
    files = {path: text for path, text in texts.items() if text is not None}
    world, reference, modes = _start(row, files, places, store)
    shown = fields["messages"]
    messages = shown if isinstance(shown, list) else [{"role": "user", "content": shown}]
    return Task(
        id=str(fields["id"]),
        messages=tuple(messages),
        files=files,
        path=fields.get("path", ""),
        entry_point="",
        visible_tests=Tests(),
        hidden_tests=Tests(suite=suite),
        reference={path: text for path, text in reference.items() if text is not None},
        meta={
            "source": "records",
            "split": fields.get("split", ""),
            "description": shown if isinstance(shown, str) else str(shown[-1].get("content", "")),
            "deleted": tuple(path for path, text in reference.items() if text is None),
            "modes": modes,
            **({"repository": fields["repo"]} if fields.get("repo") else {}),
        },
        world=world,
    )


def _suite(row: _Row) -> Suite:
    failing = row.read(read_ids, "fail_to_pass")
    passing = row.read(read_ids, "pass_to_pass") if row.fields.get("pass_to_pass") else ()
    if not failing or set(failing) & set(passing):
        row.wrong("fail_to_pass", "at least one id, and none of pass_to_pass", repr(failing)[:80])
    tests = row.read(read_object, "test_files") if row.fields.get("test_files") else {}
    return Suite(row.texts("test_files", tests), failing, passing)


def _start(
    row: _Row, files: Mapping[str, str], places: Places, store: Callable[[], LayerStore]
) -> tuple[World | None, dict[str, str | None], dict[str, int]]:
    """The world that the agent starts from, what the reference changes, and rights of files."""
    fields = row.fields
    world = None
    if fields.get("world"):
        world = read_world(row.file, row.line, fields["world"], row.columns)
    source = None
    if fields.get("repo"):
        if world is not None or not fields.get("commit"):
            row.wrong("commit", "a commit of the repo, and no world beside it", "another row")
        source = _repository(fields["repo"], places)
        if source is None:
            row.wrong("repo", "a folder, or a name in places.repositories", repr(fields["repo"]))
    try:
        with Scratch([source] if source else []) as scratch:
            base = scratch.commit_id(fields["commit"]) if source else scratch.empty()
            start = scratch.with_files(base, files)
            reference, modes = _reference(fields.get("reference"), scratch, start)
            if source is not None:
                layer = repository_layer(store(), scratch.folder, base)
                return bare(store(), places, layer), reference, modes
    except PatchError as error:
        row.wrong("reference", "a patch that git applies to the repository", str(error))
    except (RepositoryError, NoWorld) as error:
        row.wrong("commit", "a commit of the repository", str(error))
    if world is None and places.packages:
        try:
            world = World(places.package_layers(store()))
        except NoWorld as error:
            row.wrong("world", "packages that can be installed", str(error))
    return world, reference, modes


def _repository(name: str, places: Places) -> Path | None:
    """The folder of a repository; None where there is none."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return places.repository(name)
    except NoWorld:
        return None


def _reference(
    value: Any, scratch: Scratch, start: str
) -> tuple[dict[str, str | None], dict[str, int]]:
    """Path -> text of what a reference changes, and path -> rights where a patch changes them.
    Raises PatchError.
    """
    if not value:
        return {}, {}
    if isinstance(value, str):
        changed = scratch.apply(start, value)
        return scratch.changes(start, changed), scratch.modes(start, changed)
    if not all(isinstance(text, str | None) for text in value.values()):
        raise PatchError("it holds something else than texts")
    return dict(value), {}
