"""Exercism's practice exercises of the Python track, from a checkout.

    <folder>/.docs/instructions.md (and introduction.md, instructions.append.md)
    <folder>/.meta/example.py, the reference
    <folder>/*_test.py, the tests; other *.py files, where the agent begins

``.meta/config.json`` says which file is which where it is there. The tests are hidden.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.cache import Cache
from rl_code.tasks.pytest_ids import ids_of
from rl_code.tasks.row_files import TaskFileError
from rl_code.tasks.source import NoTask, read_text
from rl_code.tasks.suites_by_run import SuiteFolders
from rl_code.types import Suite, Task, Tests, World

_DOCS = ("introduction.md", "instructions.md", "instructions.append.md")


@dataclasses.dataclass(frozen=True)
class Exercism(SuiteFolders):
    """Exercism's practice exercises, see ``exercism``. path: the checkout of the track, or the
    folder that holds the folders of exercises.
    """

    kind: ClassVar[str] = "exercism"

    def task(
        self, id: str, folder: Path, store: LayerStore, pool: SandboxPool, cache: Cache
    ) -> Task:
        layers = self.places.package_layers(store)
        return _task(id, folder, World(layers) if layers else None, self.command)

    def folders(self) -> list[Path]:
        at = Path(self.path)
        practice = at / "exercises" / "practice"
        at = practice if practice.is_dir() else at
        found = sorted(path.parent for path in at.glob("*/.meta")) if at.is_dir() else []
        if not found:
            raise TaskFileError(f"{at}: no folder of exercises: none of its folders has .meta/")
        return found


def _task(id: str, folder: Path, world: World | None, command: tuple[str, ...]) -> Task:
    """The task of a folder. Raises NoTask, UnknownIds."""
    listed = _listed(folder)
    tests = _texts(folder, listed["test"])
    start = _texts(folder, listed["solution"])
    examples = list(_texts(folder, listed["example"]).values())
    if len(examples) != len(start):
        raise NoTask(f"{len(examples)} files of an example for {len(start)} to write")
    docs = [folder / ".docs" / name for name in _DOCS]
    words = "\n\n".join(read_text(path).strip() for path in docs if path.is_file())
    if not words:
        raise NoTask(".docs/instructions.md is missing")
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
    """Paths of the files by kind: "solution", "test", "example", "editor". Raises NoTask."""
    config = folder / ".meta" / "config.json"
    files = {}
    if config.is_file():
        text = read_text(config)
        try:
            files = json.loads(text)["files"]
            for paths in files.values():
                if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
                    raise ValueError(f"files holds {paths!r} instead of a list of paths")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NoTask(f".meta/config.json cannot be read: {error}") from error
    top = sorted(path.name for path in folder.glob("*.py"))
    found = {
        "test": files.get("test") or [name for name in top if name.endswith("_test.py")],
        "example": files.get("example") or [".meta/example.py"],
        "editor": files.get("editor", []),
    }
    others = [name for name in top if name not in (*found["test"], *found["editor"])]
    found["solution"] = files.get("solution") or others
    if missing := [kind for kind in ("test", "solution") if not found[kind]]:
        raise NoTask(f"it has no file of the kind {missing[0]}")
    return found


def _texts(folder: Path, paths: Sequence[str]) -> dict[str, str]:
    """Path -> text. Raises NoTask."""
    found = {}
    for path in paths:
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise NoTask(f"the path {path!r} leads out of the folder")
        found[path] = read_text(folder / path)
    return found
