"""Tests of a suite that pass before the work: found by running them once, and kept.

Folders of tasks name files of tests and not which of them fail at first.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from rl_code.environment.grading import grade_in_words
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.suite_grader import SuiteError, passes
from rl_code.store.serialization import dumps
from rl_code.tasks.cache import SUITES, Cache
from rl_code.tasks.pytest_ids import UnknownIds
from rl_code.tasks.source import NoTask, SourceOfWorlds, store_of
from rl_code.tasks.worlds import NoWorld, Places
from rl_code.types import Limits, Suite, Task, Tests

_LIMITS = Limits(turns=1, tokens=1, turn_tokens=1, test_runs=1, command_s=60.0, grade_s=60.0)


def split(task: Task, pool: SandboxPool, cache: Cache) -> Task:
    """The task whose suite tells the tests that pass on its files from those that fail.

    A suite of which all tests pass is left as it is: it decides nothing, which validation finds.
    Raises SandboxFault.
    """
    suite = task.hidden_tests.suite
    if suite is None:
        return task
    key = hashlib.sha256(dumps((task.files, task.world, suite))).hexdigest()
    passing = cache.get(key)
    if passing is None:
        alone = dataclasses.replace(task, hidden_tests=Tests(suite=suite))
        errors = grade_in_words(alone, task.files, pool, _LIMITS)[1][-len(suite.ids) :]
        passing = [id for id, error in zip(suite.ids, errors, strict=True) if passes(error)]
        cache.put({key: passing})
    failing = tuple(id for id in suite.ids if id not in set(passing))
    if not failing:
        return task
    suite = dataclasses.replace(suite, fail_to_pass=failing, pass_to_pass=tuple(passing))
    return dataclasses.replace(
        task, hidden_tests=dataclasses.replace(task.hidden_tests, suite=suite)
    )


@dataclasses.dataclass(frozen=True)
class SuiteFolders(SourceOfWorlds):
    """A folder for each task, with files of tests of which a run tells those that fail at first."""

    # The folder of the tasks' folders.
    path: str = dataclasses.field(kw_only=True)
    # Folders of packages and images; pytest must be among them.
    places: Places = Places()
    # Command that starts pytest in the workspace.
    command: tuple[str, ...] = Suite.command

    # The first part of the tasks' ids.
    kind: ClassVar[str]

    refusals = (NoTask, NoWorld, UnknownIds, SuiteError)

    def folders(self) -> list[Path]:
        """The folders of the tasks, in order. Raises TaskFileError where there are none."""
        raise NotImplementedError

    def task(
        self, id: str, folder: Path, store: LayerStore, pool: SandboxPool, cache: Cache
    ) -> Task:
        """The task of a folder. Raises NoTask, NoWorld, UnknownIds, SuiteError."""
        raise NotImplementedError

    def count(self) -> int:
        return len(self.folders())

    def builders(
        self, pool: SandboxPool | None, workdir: Path | None
    ) -> Iterator[tuple[str, Callable[[], Task]]]:
        store = store_of(pool, self.kind)
        cache = Cache(workdir / SUITES if workdir else None)
        for folder in self.folders():
            id = f"{self.kind}/{folder.name}"

            def build(id: str = id, folder: Path = folder) -> Task:
                return split(self.task(id, folder, store, pool, cache), pool, cache)

            yield id, build
