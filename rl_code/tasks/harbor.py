"""Tasks in Harbor's format: a folder for each.

    instruction.md    what the agent is asked
    task.toml         read for the image's name and the kind of task
    environment/      a Dockerfile, and files that it copies
    tests/            test_*.py and what they read; test.sh is not run
    solution/         solve.sh, which is run once, in a sandbox: what it changes is the reference

The world is the task's image, unpacked or as an OCI layout, without a container daemon. A task
without an image works where its Dockerfile only copies files; packages then come from a lock.

Departures from Harbor: tests are run by pytest in the workspace, where they lie in the folder
``harbor_tests`` instead of /tests, and a reward that test.sh computes in another way is not read.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import os
import posixpath
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.sandbox.snapshot import File, texts
from rl_code.store.serialization import dumps
from rl_code.tasks.cache import Cache
from rl_code.tasks.pytest_ids import ids_of
from rl_code.tasks.row_files import TaskFileError
from rl_code.tasks.source import NoTask, read_text
from rl_code.tasks.suites_by_run import SuiteFolders
from rl_code.tasks.worlds import Places
from rl_code.text.lines import split_lines
from rl_code.types import Suite, Task, Tests, World

TESTS = "harbor_tests"
_SOLUTION = ".solution"
_SOLVE_S = 600.0
# What a Dockerfile may hold for a world to be made without it.
_COPIES = {"COPY", "ADD"}
_NOTHING = {"FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "ENV", "ARG", "WORKDIR", "USER"}


@dataclasses.dataclass(frozen=True)
class Harbor(SuiteFolders):
    """Harbor's task folders, see ``harbor``.

    path: the folder of the tasks' folders, or one of them. Images in ``places`` have the names of
    folders, or that of task.toml.
    """

    kind: ClassVar[str] = "harbor"

    def task(
        self, id: str, folder: Path, store: LayerStore, pool: SandboxPool, cache: Cache
    ) -> Task:
        task = _task(id, folder, self.places, store, self.command)
        return _with_reference(task, folder / "solution", pool, cache)

    def folders(self) -> list[Path]:
        at = Path(self.path)
        if (at / "task.toml").is_file():
            return [at]
        found = sorted(path.parent for path in at.glob("*/task.toml")) if at.is_dir() else []
        if not found:
            raise TaskFileError(f"{at}: no folder of tasks: none of its folders has task.toml")
        return found


def _task(
    id: str, folder: Path, places: Places, store: LayerStore, command: tuple[str, ...]
) -> Task:
    """The task of a folder, without its reference. Raises NoTask, NoWorld, UnknownIds."""
    settings = _settings(folder / "task.toml")
    instruction = read_text(folder / "instruction.md").strip()
    environment = settings.get("environment")
    named = environment.get("docker_image", "") if isinstance(environment, dict) else ""
    if not isinstance(named, str):
        raise NoTask(f"task.toml: environment.docker_image = {named!r} must be a text")
    image = places.image(store, (named, folder.name))
    packages = places.package_layers(store)
    files: dict[str, str] = {}
    if image is not None:
        world = dataclasses.replace(image, layers=(*image.layers, *packages))
    else:
        files = _copied(folder / "environment")
        world = World(packages) if packages else None
    tests = {
        f"{TESTS}/{path}": text
        for path, text in _texts(folder / "tests").items()
        if path != "test.sh"
    }
    runs = {path: text for path, text in tests.items() if fnmatch.fnmatch(path, "*/test_*.py")}
    if not runs:
        raise NoTask("tests/ has no test_*.py: only tests that pytest runs are graded")
    return Task(
        id=id,
        messages=({"role": "user", "content": instruction},),
        files=files,
        path="",
        entry_point="",
        visible_tests=Tests(),
        hidden_tests=Tests(suite=Suite(tests, ids_of(runs), (), command)),
        reference={},
        meta={
            "source": "harbor",
            "split": "test",
            "description": instruction,
            "modes": {
                path: 0o755
                for path in tests
                if os.access(folder / "tests" / path.removeprefix(f"{TESTS}/"), os.X_OK)
            },
        },
        world=world,
    )


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise NoTask(f"task.toml is no TOML: {error}") from error


def _copied(folder: Path) -> dict[str, str]:
    """The files that a Dockerfile copies, relative to its last WORKDIR. Raises NoTask for one that
    does more.
    """
    workdir = "/"
    context = _texts(folder)
    files: dict[str, str] = {}
    number, further = 1, 0
    # a line that goes on below keeps a mark for each line break
    for joined in split_lines(read_text(folder / "Dockerfile").replace("\\\n", "\0")):
        number += further
        further = 1 + joined.count("\0")
        line = joined.replace("\0", " ")
        word, _, rest = line.strip().partition(" ")
        name = word.upper()
        if not word or word.startswith("#"):
            continue
        if name == "WORKDIR":
            workdir = posixpath.join(workdir, rest.strip())
        elif name in _COPIES:
            files |= _copy(number, rest, workdir, context)
        elif name not in _NOTHING:
            raise NoTask(
                f"environment/Dockerfile, line {number}: {name} needs an image: name a folder with "
                "one as places.images"
            )
    inside = {posixpath.relpath(path, workdir): text for path, text in files.items()}
    if outside := [path for path in inside if path.startswith("../")]:
        raise NoTask(f"environment/Dockerfile copies to {outside[0]}, outside of {workdir}")
    return inside


def _copy(number: int, rest: str, workdir: str, context: Mapping[str, str]) -> dict[str, str]:
    """Absolute path -> text of what one line of a Dockerfile copies. Raises NoTask."""
    try:
        words = shlex.split(rest)
    except ValueError:  # a quotation that does not end
        words = []
    if len(words) < 2 or words[0].startswith(("--", "[")):
        raise NoTask(f"environment/Dockerfile, line {number}: COPY {rest} cannot be followed")
    *sources, target = words
    into = posixpath.join(workdir, target)
    is_folder = target.endswith("/") or target == "." or len(sources) > 1
    found = {}
    for source in sources:
        source = posixpath.normpath(source)
        for path, text in context.items():
            if path == "Dockerfile":
                continue
            if path == source:
                name = posixpath.basename(path)
                found[posixpath.join(into, name) if is_folder else into] = text
            elif source == "." or path.startswith(f"{source}/"):
                inner = posixpath.relpath(path, source)
                found[posixpath.join(into, inner)] = text
    if not found and sources != ["."]:
        raise NoTask(f"environment/Dockerfile, line {number}: there is no {' '.join(sources)}")
    return {posixpath.normpath(path): text for path, text in found.items()}


def _with_reference(task: Task, folder: Path, pool: SandboxPool, cache: Cache) -> Task:
    """The task with what solve.sh changes as its reference, if there is one. Raises NoTask."""
    if not (folder / "solve.sh").is_file():
        return task
    script = _texts(folder)
    key = hashlib.sha256(dumps(("solve", "modes", task.files, task.world, script))).hexdigest()
    if (known := cache.get(key)) is None:
        known = _solve(task, script, pool)
        cache.put({key: known})
    modes = {**known["modes"], **task.meta["modes"]}
    meta = {**task.meta, "deleted": tuple(known["deleted"]), "modes": modes}
    return dataclasses.replace(task, reference=known["texts"], meta=meta)


def _solve(task: Task, script: Mapping[str, str], pool: SandboxPool) -> dict[str, Any]:
    """Run solve.sh, and return the changes it makes: "texts", path -> text, "modes", path -> rights
    that are not the usual ones, and "deleted", paths. Raises NoTask.
    """
    files = {**task.files, **{f"{_SOLUTION}/{path}": text for path, text in script.items()}}
    try:
        sandbox = pool.open(files, task.world)
    except ValueError as error:
        raise NoTask(f"its files do not go into a workspace: {error}") from error
    with sandbox:
        done = sandbox.run(["bash", f"{_SOLUTION}/solve.sh"], timeout_s=_SOLVE_S)
        if done.exit_code:
            said = " ".join(done.stdout.split())[-200:]
            raise NoTask(f"solution/solve.sh ended with {done.exit_code}: {said}")
        after = sandbox.snapshot()
    after = {path: entry for path, entry in after.items() if not path.startswith(f"{_SOLUTION}/")}
    after.pop(_SOLUTION, None)
    changed = {path: entry for path, entry in after.items() if task.files.get(path) != entry}
    odd = [path for path in changed if path not in texts(changed) and not _gone(changed[path])]
    if odd:
        raise NoTask(f"solution/solve.sh makes {odd[0]}, which is no text")
    gone = [path for path in task.files if path not in after]
    gone += [path for path, entry in changed.items() if _gone(entry)]
    modes = {
        path: entry.mode
        for path, entry in changed.items()
        if isinstance(entry, File) and entry.kind == "file"
    }
    return {"texts": texts(changed), "modes": modes, "deleted": sorted(set(gone))}


def _gone(entry: str | File) -> bool:
    return isinstance(entry, File) and entry.kind == "deleted"


def _texts(folder: Path) -> dict[str, str]:
    """Path -> text of the files in a folder; none of no folder. Raises NoTask."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): read_text(path) for path in found}
