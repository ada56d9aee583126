"""Tasks that ``launch.make_tasks`` made from packages: features to write again, bugs to mend.

A line of the file says which layer the package is and which lines of it are others; a task's files
and reference follow from the layer. So the loader needs the folder that the maker wrote, with its
layers, and ``sandbox.layers`` must name them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_code.environment.layers.store import LayerStore, MissingLayer
from rl_code.environment.sandbox.inside.world import WORKSPACE
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.makers.candidate import Change, broken
from rl_code.tasks.row_files import Read, TaskFileError, each_task, malformed, readable
from rl_code.tasks.source import SourceOfRows
from rl_code.types import Layer, Suite, Task, Tests, World

FILE = "tasks.jsonl"
LAYERS = "layers"
# What is done to a package: taken out, emptied, one bug, bugs in several files.
KINDS = ("removed", "emptied", "bug", "bugs")
_COLUMNS = {
    "id": str,
    "package": str,
    "version": str,
    "kind": str,
    "operators": list,
    "functions": list,
    "message": str,
    "world": dict,
    "changes": list,
    "visible": dict,
    "hidden": dict,
}


def load(
    folder: Path, kinds: Collection[str] = KINDS, packages: Collection[str] = ()
) -> list[Task]:
    """The tasks of ``each``. Raises TaskFileError for the first row without one."""
    return readable(each(folder, kinds, packages))


def each(
    folder: Path, kinds: Collection[str] = KINDS, packages: Collection[str] = ()
) -> Iterator[Read]:
    """The tasks of a folder that ``launch.make_tasks`` wrote, in its order, or why a row has none,
    such as a layer that is not there.

    kinds: of KINDS. packages: names of packages, () for all. Raises TaskFileError where no row is
    of them.
    """
    file = folder / FILE
    store = LayerStore(folder / LAYERS) if (folder / LAYERS).is_dir() else None
    texts = functools.lru_cache(None)(lambda digest, path: _text(store, digest, path))
    found = set()

    def make(line: int, row: dict[str, Any]) -> Task | None:
        found.add(row["package"])
        if row["kind"] not in kinds or (packages and row["package"] not in packages):
            return None
        try:
            return _task(row, texts)
        except (KeyError, TypeError, ValueError, OSError, MissingLayer) as error:
            malformed(file, line, "id", "a task of launch.make_tasks", f"{row['id']!r} ({error})")

    count = 0
    for one in each_task(file, _COLUMNS, make, "id"):
        count += 1
        yield one
    for name in sorted(set(packages) - found):
        raise TaskFileError(f"{file}: no task of the package {name!r}; it has {sorted(found)}")
    if not count:
        raise TaskFileError(f"{file}: no task of the kinds {', '.join(kinds)}")


def _task(row: Mapping[str, Any], texts: Any) -> Task:
    layers = tuple(Layer(layer["digest"], layer["at"]) for layer in row["world"]["layers"])
    (package,) = [layer for layer in layers if layer.at == WORKSPACE]
    world = World(layers, row["world"]["workspace"], row["world"]["environment"])
    changes = [
        Change(one["path"], one["line"], tuple(one["old"]), tuple(one["new"]))
        for one in row["changes"]
    ]
    reference = {change.path: texts(package.digest, change.path) for change in changes}
    return Task(
        id=row["id"],
        messages=({"role": "user", "content": row["message"]},),
        files={**broken(reference, changes), **row["visible"]["files"]},
        path="",
        entry_point="",
        visible_tests=_tests(row["visible"]),
        hidden_tests=_tests(row["hidden"]),
        reference=reference,
        meta={
            "source": "made",
            "split": "",
            "package": row["package"],
            "version": row["version"],
            "kind": row["kind"],
            "operators": tuple(row["operators"]),
            "functions": tuple(row["functions"]),
        },
        world=world,
    )


def _tests(side: Mapping[str, Any]) -> Tests:
    """The suite of a side; no tests where it has none."""
    if not side["fail_to_pass"]:
        return Tests()
    suite = Suite(side["files"], tuple(side["fail_to_pass"]), tuple(side["pass_to_pass"]))
    return Tests(suite=suite)


def _text(store: LayerStore | None, digest: str, path: str) -> str:
    """A file of a layer. Raises MissingLayer, OSError."""
    if store is None:
        raise MissingLayer(f"there is no folder {LAYERS} beside it")
    return (store.folder / store.tree(digest) / path).read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Made(SourceOfRows):
    """Tasks that ``launch.make_tasks`` made from Python packages."""

    # The folder that it wrote; ``sandbox.layers`` must be its folder ``layers``.
    folder: str
    # Some of "removed", "emptied", "bug" and "bugs".
    kinds: tuple[str, ...] = KINDS
    # Names of packages; () for all. Held-out tasks are best those of packages of their own.
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"{self.kinds=} must be some of {', '.join(KINDS)}")

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        return each(Path(self.folder), self.kinds, self.packages)
