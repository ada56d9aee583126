"""Repository tasks in the formats of SWE-bench, SWE-Gym, SWE-smith and R2E-Gym, from JSON lines or
Parquet.

SWE-bench (2310.06770) and SWE-Gym (2412.21139): the repository at ``base_commit`` is the start,
``patch`` the reference, and ``test_patch`` the change of the tests that grade.

SWE-smith (2504.21798): ``patch`` makes the bug. The agent starts from one commit without a past,
since the past is the solution, and without the test files that hold a failing test.

R2E-Gym (2504.07164): the commit that fixed the problem is known, with the files of its tests, and
with the logs of pytest before and after it, from which the ids of tests are read.

Which format a row has is told by its columns. Departures: tests are run by pytest, also where a
repository has a runner of its own, whose ids are put as pytest's (``unittest_ids``); tests that are
expected to fail after the fix, as in R2E-Gym, are left out.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rl_code.environment.layers.repository import RepositoryError
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.sandbox.snapshot import File
from rl_code.tasks.patches import PatchError, Scratch
from rl_code.tasks.row_files import count_rows, each_task
from rl_code.tasks.source import NoTask, SourceOfWorlds, builders_of, store_of
from rl_code.tasks.swe_rows import Row, read_row
from rl_code.tasks.unittest_ids import ForeignId, UnittestIds
from rl_code.tasks.worlds import (
    NoWorld,
    Places,
    bare,
    object_folders,
    over_image,
    repository_layer,
)
from rl_code.text import python_source
from rl_code.types import Suite, Task, Tests


@dataclasses.dataclass(frozen=True)
class Swe(SourceOfWorlds):
    """SWE-bench, SWE-Gym, SWE-smith or R2E-Gym, see ``swe``."""

    # The file: .jsonl, .jsonl.gz or .parquet.
    path: str = dataclasses.field(kw_only=True)
    # Folders of repositories, images and packages.
    places: Places = Places()
    # Command that starts pytest in the workspace.
    command: tuple[str, ...] = Suite.command
    # True if ``patch`` makes the bug, as in SWE-smith; False if it mends it; None: it makes it in
    # rows that have no ``test_patch``.
    breaks: bool | None = None
    # The split that the tasks are said to be of.
    split: str = "test"

    refusals = (NoTask, NoWorld, PatchError, RepositoryError)

    def count(self) -> int:
        return count_rows(Path(self.path))

    def builders(
        self, pool: SandboxPool | None, workdir: Path | None
    ) -> Iterator[tuple[str, Callable[[], Task]]]:
        store = store_of(pool, "swe")
        file = Path(self.path)
        rows = each_task(
            file,
            {"problem_statement": str},
            lambda line, cells: read_row(file, line, cells, self.breaks),
            "instance_id",
        )
        return builders_of(rows, lambda row: _task(row, self, store))


def _task(row: Row, source: Swe, store: LayerStore) -> Task:
    """The task of a row. Raises NoTask, NoWorld, PatchError, RepositoryError."""
    places = source.places
    image = places.image(store, row.images)
    found = places.repository(row.repository)
    if image is None and found is None:
        raise NoWorld("neither ``repositories`` nor ``images`` names a folder to start from")
    known = [found] if found else []
    known += object_folders(store, image) if image else []
    with Scratch(known) as scratch:
        base = scratch.commit_id(row.base)
        files, modes = _test_files(row, scratch, base)
        start, reference, mended = _versions(row, scratch, base)
        ids = _resolved(row, files, lambda path: scratch.text(base, path))
        if row.breaks:  # tests that show the bug do not stand in the agent's workspace
            hidden = sorted({id.partition("::")[0] for id in ids[0]})
            files = {path: scratch.text(base, path) for path in hidden}
            if missing := [path for path, text in files.items() if text is None]:
                raise PatchError(f"FAIL_TO_PASS names {missing[0]}, which is not in the repository")
            gone: dict[str, str | File] = {path: File(b"", kind="deleted") for path in hidden}
            start = scratch.commit(scratch.with_files(start, gone), row.repository)
        digest = repository_layer(store, scratch.folder, start)
        changed = scratch.changes(base, start)
        world = (
            bare(store, places, digest)
            if image is None
            else over_image(store, places, image, digest, changed)
        )
    return Task(
        id=row.id,
        messages=({"role": "user", "content": asked(row.statement)},),
        files={},
        path="",
        entry_point="",
        visible_tests=Tests(),
        hidden_tests=Tests(suite=Suite(files, *ids, source.command)),
        reference={path: text for path, text in reference.items() if text is not None},
        meta={
            "source": "swe",
            "split": source.split,
            "repository": row.repository,
            "description": row.statement,
            "base_commit": base,
            "deleted": tuple(path for path, text in reference.items() if text is None),
            "modes": {**mended, **modes},
        },
        world=world,
    )


def asked(statement: str) -> str:
    """The message that puts a problem of a repository to the agent."""
    return (
        f"{statement.strip()}\n\nThe repository is your workspace. Change its code so that this is "
        "solved, and call submit. Hidden tests decide; changes of tests do not count."
    )


def _test_files(
    row: Row, scratch: Scratch, base: str
) -> tuple[dict[str, str | None], dict[str, int]]:
    """The files of tests as they grade, those that the row patches and those that it holds, and
    their rights.
    """
    if not row.test_patch:
        return {**row.test_files}, {}
    try:
        tested = scratch.apply(base, row.test_patch)
        patched = scratch.changes(base, tested)
    except PatchError as error:
        raise PatchError(f"test_patch: {error}") from error
    return {**patched, **row.test_files}, scratch.modes(base, tested)


def _versions(
    row: Row, scratch: Scratch, base: str
) -> tuple[str, dict[str, str | None], dict[str, int]]:
    """The commit or tree that the agent starts from, the reference's changes of it, and the rights
    of files that are changed.
    """
    if row.breaks:
        start, solved = scratch.apply(base, row.breaks), base
    elif row.mends:
        start, solved = base, scratch.apply(base, row.mends)
    else:
        start, solved = base, scratch.commit_id(row.fixed)
    every = scratch.changes(start, solved)
    if row.fixed:
        every = {path: text for path, text in every.items() if not is_test(path)}
    modes = {path: mode for path, mode in scratch.modes(start, solved).items() if path in every}
    return start, every, modes


def is_test(path: str) -> bool:
    """True if a file of a repository is a file of tests, by its path."""
    *folders, name = path.split("/")
    return bool({"test", "tests", "testing"} & set(folders)) or (
        name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"
    )


def _resolved(
    row: Row, files: Mapping[str, str | None], text_before: Callable[[str], str | None]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ids as pytest writes them. One that is the name of a function alone, as in the rows of
    sympy, is looked up in the files of tests; one of unittest, as in those of Django, in all files
    of the repository. Raises ForeignId.

    files: those of tests as they grade. text_before: of the other files, by path.
    """
    of_unittest = UnittestIds(
        lambda path: files[path] if path in files else text_before(path),
        files,
        row.fail_to_pass + row.pass_to_pass,
    )
    found = {}
    for path, text in files.items():
        for name in _functions(text or ""):
            found.setdefault(name, []).append(path)

    def full(id: str) -> str:
        if "::" in id:
            return id
        name = id.partition("[")[0]
        if not name.isidentifier():
            return of_unittest.find(id)
        paths = found.get(name, [])
        if len(paths) == 1:
            return f"{paths[0]}::{id}"
        raise ForeignId(
            f"the test {id[:80]!r} is none of pytest's: expected path::name, or the name of one "
            f"function of the files of tests, which {len(paths)} of them have"
        )

    # Two ways to write an id may be in one row, and mean the same test.
    failing = tuple(dict.fromkeys(map(full, row.fail_to_pass)))
    passing = tuple(dict.fromkeys(map(full, row.pass_to_pass)))
    if both := sorted(set(failing) & set(passing)):
        raise ForeignId(f"FAIL_TO_PASS and PASS_TO_PASS both name {both[0]}")
    return failing, passing


def _functions(text: str) -> list[str]:
    """Names of the functions at the top of a module; none for what is no Python."""
    try:
        body = python_source.parse(text).body
        return [node.name for node in body if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return []
