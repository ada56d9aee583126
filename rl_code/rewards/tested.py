"""Reward for a solution's own tests: the share of bugs in its changed lines that they notice.

That a test executes a line says little: it may assert nothing. So bugs are put into the changed
lines, one at a time (``versions.py``), and a line counts as tested by the share of its bugs
with which the work's own tests fail (mutation score). A line that no test executes notices none.

Tests that look at the text of the code instead of running it would notice every bug. So the code
of every run, with a bug or without one, is written in another form that does the same
(``disguise.py``): another text of another length, other names in the module, other code objects.
Some runs have no bug, and one has the work as it was handed in: unless all of these pass, nothing
is paid. Runs are in fresh sandboxes and in an order that nobody can foresee.

What is left to a cheat is to undo all of this, which takes a test that compares syntax trees.

Only solved work is paid, so tests alone are worth nothing. Own tests are the files test_*.py and
*_test.py that the work adds or changes: functions test_* without parameters, and unittest's cases.
Fixtures of pytest are not known here.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping
from pathlib import PurePosixPath

from absl import logging

from rl_code.environment.finished import FinishedEpisode
from rl_code.environment.sandbox.disposable import OutOfBounds, bounded
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.rewards.versions import versions
from rl_code.types import World

# Runs without a bug, beside that of the work as it is.
_CONTROLS = 4

# Runs tests by the standard library alone; 0 if some ran and all passed.
_RUNNER = """
import importlib.util, inspect, sys, unittest
sys.path.insert(0, ".")
ran = 0
for number, path in enumerate(sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(f"own_tests_{number}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for name, value in list(vars(module).items()):
        if name.startswith("test") and inspect.isfunction(value):
            if not inspect.signature(value).parameters:
                value()
                ran += 1
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    if not result.wasSuccessful():
        sys.exit(1)
    ran += result.testsRun - len(result.skipped)
sys.exit(0 if ran else 1)
"""


@dataclasses.dataclass(frozen=True)
class Tested:
    """0 for work without tests of its own, to 1 for work whose tests notice every bug that was
    tried in its changed lines.
    """

    # Bugs that are tried, at most.
    bugs: int = 8
    # Wall-clock seconds of one run of the tests, and of all together. Making the bugs may take as
    # many CPU seconds, which count among them.
    run_s: float = 5.0
    seconds: float = 30.0
    __test__ = False  # for pytest: no tests of ours

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be above 0")

    def __call__(self, episode: FinishedEpisode) -> float:
        """The signal of a finished episode. Raises SandboxFault."""
        if not episode.grade.solved or episode.sandboxes is None:
            return 0.0
        before, after = episode.files_before, episode.files_after
        changed = [
            path for path in after if path.endswith(".py") and after[path] != before.get(path)
        ]
        tests = sorted(path for path in changed if is_test(path))
        if not tests:
            return 0.0
        end = time.monotonic() + self.seconds
        sources = [path for path in changed if not is_test(path)]
        try:
            made = bounded(
                versions,
                self.seconds,
                {path: before[path] for path in sources if path in before},
                {path: after[path] for path in sources},
                f"tested/{episode.task.id}",
                self.bugs,
                _CONTROLS,
            )
        except OutOfBounds as error:
            logging.info("task %s: the bugs of its work cannot be made: %s", episode.task.id, error)
            return 0.0
        if not made:
            return 0.0
        runs = [({**after, **texts}, is_bug) for texts, is_bug in made]
        runs.append((dict(after), False))
        random.SystemRandom().shuffle(runs)  # an order that nobody can foresee
        noticed = 0
        for files, is_bug in runs:
            left_s = min(self.run_s, end - time.monotonic())
            if left_s <= 0:
                return 0.0
            passed = _pass(files, tests, episode.sandboxes, episode.task.world, left_s)
            if not is_bug and not passed:
                return 0.0
            noticed += is_bug and not passed
        return noticed / sum(is_bug for _, is_bug in runs)


def is_test(path: str) -> bool:
    """True if the path is that of a file of tests."""
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def _pass(
    files: Mapping[str, str],
    tests: list[str],
    sandboxes: SandboxPool,
    world: World | None,
    seconds: float,
) -> bool:
    """True if the tests run and pass on these files in a fresh sandbox. If the machine or the tests
    bring that sandbox down, they run once more in another one. Raises SandboxFault.
    """
    for _ in range(2):
        try:
            sandbox = sandboxes.open(files, world)
        except ValueError:  # files made to fit no other workspace
            return False
        with sandbox:
            done = sandbox.run(["python3", "-B", "-c", _RUNNER, *tests], timeout_s=seconds)
            if not sandbox.lost:
                return done.exit_code == 0
    return False
