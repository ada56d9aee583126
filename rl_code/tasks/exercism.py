"""Exercism's practice exercises of the Python track, from a checkout.

    <folder>/.docs/instructions.md (and introduction.md, instructions.append.md)
    <folder>/.meta/example.py, the reference
    <folder>/*_test.py, the tests; other *.py files, where the agent begins

``.meta/config.json`` says which file is which where it is there. The tests are hidden.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.suite_grader import SuiteError
from rl_code.tasks.pytest_ids import UnknownIds, ids_of
from rl_code.tasks.records import TaskFileError
from rl_code.tasks.source import SourceOfWorlds, store_of
from rl_code.tasks.suites_by_run import CACHE_FILE, Cache, split
from rl_code.tasks.worlds import NoWorld, Places
from rl_code.types import Suite, Task, Tests, World

_DOCS = ("introduction.md", "instructions.md", "instructions.append.md")


@dataclasses.dataclass(frozen=True)
class Exercism(SourceOfWorlds):
    """Exercism's practice exercises, see ``exercism``."""

    # The checkout of the track, or the folder that holds the folders of exercises.
    path: str = dataclasses.field(kw_only=True)
    # Packages of all tasks; pytest must be among them.
    places: Places = Places()
    # What starts pytest in the workspace.
    command: tuple[str, ...] = Suite.command

    def count(self) -> int:
        return len(self._folders())

    def load_each(
        self, pool: SandboxPool | None, workdir: Path | None
    ) -> Iterator[tuple[str, Task | str]]:
        store = store_of(pool, "exercism")
        cache = Cache(workdir, CACHE_FILE)
        for folder in self._folders():
            id = f"exercism/{folder.name}"
            try:
                layers = self.places.package_layers(store)
                task = _task(id, folder, World(layers) if layers else None, self.command)
                yield id, split(task, pool, cache)
            except (NoWorld, UnknownIds, Incomplete, SuiteError) as error:
                yield id, str(error)

    def _folders(self) -> list[Path]:
        at = Path(self.path)
        practice = at / "exercises" / "practice"
        at = practice if practice.is_dir() else at
        found = sorted(path.parent for path in at.glob("*/.meta")) if at.is_dir() else []
        if not found:
            raise TaskFileError(f"{at}: no folder of exercises: none of its folders has .meta/")
        return found


class Incomplete(ValueError):
    """A folder that lacks what a task needs."""


def _task(id: str, folder: Path, world: World | None, command: tuple[str, ...]) -> Task:
    """The task of a folder. Raises Incomplete, UnknownIds."""
    listed = _listed(folder)
    tests = _texts(folder, listed["test"])
    start = _texts(folder, listed["solution"])
    examples = list(_texts(folder, listed["example"]).values())
    if len(examples) != len(start):
        raise Incomplete(f"{len(examples)} files of an example for {len(start)} to write")
    docs = [folder / ".docs" / name for name in _DOCS]
    words = "\n\n".join(path.read_text().strip() for path in docs if path.is_file())
    if not words:
        raise Incomplete(".docs/instructions.md is missing")
    names = ", ".join(start)
    asked = f"{words}\n\nWrite {names}, which holds only a beginning, and call submit."
    return Task(
        id=id,
        messages=({"role": "user", "content": asked},),
        files={**start, **_texts(folder, listed["editor"])},
        path=next(iter(start)),
        entry_point="",
        visible_tests=Tests(),
        hidden_tests=Tests(suite=Suite(tests, ids_of(tests), (), command)),
        reference=dict(zip(start, examples, strict=True)),
        meta={"source": "exercism", "split": "test", "description": words},
        world=world,
    )


def _listed(folder: Path) -> dict[str, list[str]]:
    """Paths of the files by kind: "solution", "test", "example", "editor". Raises Incomplete."""
    config = folder / ".meta" / "config.json"
    files = {}
    if config.is_file():
        try:
            files = json.loads(config.read_text())["files"]
            if not all(isinstance(path, str) for paths in files.values() for path in paths):
                raise ValueError("files holds something else than lists of paths")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Incomplete(f".meta/config.json cannot be read: {error}") from error
    top = sorted(path.name for path in folder.glob("*.py"))
    found = {
        "test": files.get("test") or [name for name in top if name.endswith("_test.py")],
        "example": files.get("example") or [".meta/example.py"],
        "editor": files.get("editor", []),
    }
    others = [name for name in top if name not in (*found["test"], *found["editor"])]
    found["solution"] = files.get("solution") or others
    if missing := [kind for kind in ("test", "solution") if not found[kind]]:
        raise Incomplete(f"it has no file of the kind {missing[0]}")
    return found


def _texts(folder: Path, paths: Sequence[str]) -> dict[str, str]:
    """Path -> text. Raises Incomplete."""
    found = {}
    for path in paths:
        file = folder / path
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise Incomplete(f"the path {path!r} leads out of the folder")
        try:
            found[path] = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise Incomplete(f"{path} cannot be read: {error}") from error
    return found
