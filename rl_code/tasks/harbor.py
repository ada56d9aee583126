"""Tasks in Harbor's format: a folder for each.

    instruction.md    what the agent is asked
    task.toml         time limits, variables, the image's name (``harbor_settings``)
    environment/      a Dockerfile, and files that it copies (``dockerfile``)
    tests/            test.sh, which writes the reward, and what it needs
    solution/         solve.sh, which is run once, in a sandbox: what it changes is the reference

The world is the task's image, unpacked or as an OCI layout, without a container daemon. A task
without an image works where its Dockerfile only copies files; packages then come from a lock.

Work is graded as Harbor does, by test.sh (``environment.script_grader``), by the suite grader that
runs the files test_*.py of tests/, or by both, where work must pass both.

Departures from Harbor: of what an agent changes only its workspace is handed in; there is no
network; files that test or configure tests are the agent's only where the reference changes them.
For the suite grader tests lie in the folder ``harbor_tests`` of the workspace instead of /tests.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import os
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.bubblewrap import environment as of_sandboxes
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.sandbox.snapshot import File, texts
from rl_code.environment.script_grader import LOGS, TESTS, run_program
from rl_code.store.serialization import dumps
from rl_code.tasks.cache import Cache
from rl_code.tasks.dockerfile import context_of, copied
from rl_code.tasks.harbor_settings import CONFIG, Settings, read_instruction, read_settings
from rl_code.tasks.pytest_ids import UnknownIds, ids_of
from rl_code.tasks.row_files import TaskFileError
from rl_code.tasks.source import NoTask
from rl_code.tasks.suites_by_run import SuiteFolders
from rl_code.tasks.worlds import Places
from rl_code.types import Layer, Script, Suite, Task, Tests, World

PROGRAM = "test.sh"
SUITE = "harbor_tests"
SOLUTION = "/solution"
GRADERS = ("both", "script", "suite")
_SOLVE_S = 600.0
# Folders that a workspace of a task without an image cannot be in.
_TAKEN = (TESTS, "/logs", SOLUTION, "/opt", "/usr/bin", "/usr/lib", "/bin", "/lib", "/etc", "/dev")


@dataclasses.dataclass(frozen=True)
class Harbor(SuiteFolders):
    """Harbor's task folders, see ``harbor``.

    path: the folder of the tasks' folders, or one of them. Images in ``places`` have the names of
    folders, or that of task.toml.
    """

    # What decides: "script" for test.sh, "suite" for the suite grader, "both" for both of them
    # where tests/ has files that pytest runs, else test.sh.
    grader: str = "both"

    kind: ClassVar[str] = "harbor"

    def __post_init__(self) -> None:
        if self.grader not in GRADERS:
            raise ValueError(f"{self.grader=} is not one of {', '.join(GRADERS)}")

    def task(
        self, id: str, folder: Path, store: LayerStore, pool: SandboxPool, cache: Cache
    ) -> Task:
        settings = read_settings(folder)
        files, world = _world(folder, settings, self.places, store)
        script = _script(folder / "tests", settings) if self.grader != "suite" else None
        suite = _suite(folder / "tests", self.command, self.grader)
        task = _task(id, folder, settings, files, world, Tests(suite=suite, script=script))
        return _with_reference(task, folder / "solution", settings, pool, cache)

    def folders(self) -> list[Path]:
        at = Path(self.path)
        if (at / CONFIG).is_file():
            return [at]
        found = sorted(path.parent for path in at.glob(f"*/{CONFIG}")) if at.is_dir() else []
        if not found:
            raise TaskFileError(f"{at}: no folder of tasks: none of its folders has {CONFIG}")
        return found


def _task(
    id: str, folder: Path, settings: Settings, files: dict[str, str], world: World, tests: Tests
) -> Task:
    """The task of a folder, without its reference. Raises NoTask."""
    instruction = read_instruction(folder)
    limits = {} if settings.agent_s is None else {"agent_s": settings.agent_s}
    return Task(
        id=id,
        messages=({"role": "user", "content": instruction},),
        files=files,
        path="",
        entry_point="",
        visible_tests=Tests(),
        hidden_tests=tests,
        reference={},
        meta={
            "source": "harbor",
            "split": "test",
            "description": instruction,
            "modes": {
                path: 0o755
                for path in (tests.suite.files if tests.suite else ())
                if os.access(folder / "tests" / path.removeprefix(f"{SUITE}/"), os.X_OK)
            },
            **limits,
        },
        world=world,
    )


# --- The world ------------------------------------------------------------------------------------


def _world(
    folder: Path, settings: Settings, places: Places, store: LayerStore
) -> tuple[dict[str, str], World]:
    """The files that the agent starts from, over a world. Raises NoTask, NoWorld."""
    packages = places.package_layers(store)
    image = places.image(store, (settings.image, folder.name))
    if image is not None:
        workspace = settings.workdir or image.workspace
        environment = {**image.environment, **settings.environment}
        return {}, World((*image.layers, *packages), workspace, environment)
    stage = copied(folder / "environment", {"PATH": of_sandboxes()["PATH"]})
    workspace = places.workspace or settings.workdir or stage.workdir
    if workspace == "/":
        raise NoTask(
            "environment/Dockerfile has no WORKDIR: name the agent's folder as places.workspace"
        )
    if any(f"{workspace}/".startswith(f"{taken}/") for taken in _TAKEN):
        raise NoTask(f"the agent's folder {workspace} is one that the sandbox needs itself")
    files = {}
    rest = {}
    for path, entry in stage.files.items():
        inner = posixpath.relpath(path, workspace)
        if not inner.startswith("..") and entry == File(entry.content):
            try:
                files[inner] = entry.content.decode()
                continue
            except UnicodeDecodeError:
                pass
        rest[path] = entry
    layer = Layer(_root_layer(store, rest, {*stage.folders, workspace} - {"/"}), "/")
    environment = {**stage.environment, **settings.environment}
    return files, World((layer, *packages), workspace, environment)


def _root_layer(store: LayerStore, files: Mapping[str, File], folders: set[str]) -> str:
    """Digest of a layer at "/" with these files and folders. Raises NoTask."""
    entries = {path: (one.kind, one.mode, one.content) for path, one in files.items()}
    content = hashlib.sha256(dumps((sorted(entries.items()), sorted(folders)))).hexdigest()

    def fill(tree: Path) -> None:
        for path in sorted(folders):
            (tree / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        # links last, so that nothing is written through one
        for path, one in sorted(files.items(), key=lambda item: item[1].kind == "link"):
            target = tree / path.lstrip("/")
            if one.kind == "folder":
                target.mkdir(parents=True, exist_ok=True)
            elif one.kind == "link":
                target.symlink_to(os.fsdecode(one.content))
            else:
                target.write_bytes(one.content)
                target.chmod(one.mode)

    try:
        return store.build({"kind": "dockerfile", "content": content}, fill)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise NoTask(f"environment/Dockerfile copies two things to one place: {error}") from error


# --- Tests and the reference ----------------------------------------------------------------------


def _script(folder: Path, settings: Settings) -> Script:
    """The test that is test.sh. Raises NoTask."""
    entries = {path: one for path, one in context_of(folder).items() if one.kind == "file"}
    if PROGRAM not in entries:
        raise NoTask(f"tests/ has no {PROGRAM}, which writes the reward; grader='suite' needs none")
    return Script(
        {path: one.content for path, one in entries.items()},
        PROGRAM,
        tuple(path for path, one in entries.items() if one.mode == 0o755),
        settings.verifier_s,
        {**settings.environment, **settings.verifier_environment},
    )


def _suite(folder: Path, command: tuple[str, ...], grader: str) -> Suite | None:
    """The suite of what pytest runs in tests/; None where only test.sh decides. Raises NoTask,
    UnknownIds.
    """
    if grader == "script":
        return None
    found = texts(context_of(folder))
    found = {f"{SUITE}/{path}": text for path, text in found.items() if path != PROGRAM}
    runs = {path: text for path, text in found.items() if fnmatch.fnmatch(path, "*/test_*.py")}
    try:
        ids = ids_of(runs) if runs else ()
    except UnknownIds:
        if grader == "suite":
            raise
        ids = ()
    if not ids and grader == "suite":
        raise NoTask("tests/ has no test_*.py: only tests that pytest runs are graded as a suite")
    return Suite(found, ids, (), command) if ids else None


def _with_reference(
    task: Task, folder: Path, settings: Settings, pool: SandboxPool, cache: Cache
) -> Task:
    """The task with what solve.sh changes as its reference, if there is one. Raises NoTask."""
    if not (folder / "solve.sh").is_file():
        return task
    solution = context_of(folder)
    limit_s = settings.agent_s or _SOLVE_S
    variables = {**settings.environment, **settings.solution_environment}
    parts = [(path, one.kind, one.mode, one.content) for path, one in solution.items()]
    key = dumps(("solve", task.files, task.world, parts, limit_s, sorted(variables.items())))
    key = hashlib.sha256(key).hexdigest()
    if (known := cache.get(key)) is None:
        known = _solve(task, solution, variables, limit_s, pool)
        cache.put({key: known})
    modes = {**known["modes"], **task.meta["modes"]}
    meta = {**task.meta, "deleted": tuple(known["deleted"]), "modes": modes}
    return dataclasses.replace(task, reference=known["texts"], meta=meta)


def _solve(
    task: Task,
    solution: Mapping[str, File],
    variables: Mapping[str, str],
    limit_s: float,
    pool: SandboxPool,
) -> dict[str, Any]:
    """Run solve.sh, and return the changes it makes: "texts", path -> text, "modes", path -> rights
    that are not the usual ones, and "deleted", paths. Raises NoTask.
    """
    script = dataclasses.replace(solution["solve.sh"], mode=0o755)
    places = {SOLUTION: {**solution, "solve.sh": script}, LOGS: {}}
    try:
        sandbox = pool.open(task.files, task.world, places)
    except ValueError as error:
        raise NoTask(f"its files do not go into a workspace: {error}") from error
    with sandbox:
        done = run_program(sandbox, f"{SOLUTION}/solve.sh", variables, limit_s)
        if done.exit_code:
            said = " ".join(done.stdout.split())[-200:]
            raise NoTask(f"solution/solve.sh ended with {done.exit_code}: {said}")
        after = sandbox.snapshot()
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
