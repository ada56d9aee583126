"""Makes the tasks of one package, so that a run that was stopped goes on where it was.

What became of each candidate is a line of ``<folder>/progress/<package>.jsonl``, written as soon as
it is known. Candidates come in the same order in every run, so a run reads the lines and goes on
with the candidates that have none.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.errors import SandboxFault
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks.makers import bugs, deletion, package
from rl_code.tasks.makers.candidate import Candidate
from rl_code.tasks.makers.package import Package, PackageError, Pin
from rl_code.tasks.makers.runs import Runner
from rl_code.tasks.makers.survey import Survey, survey
from rl_code.tasks.makers.validate import NO_IMPORT, validate
from rl_code.text.lines import split_lines
from rl_code.types import World

# Candidates that are validated at a time.
_BATCH = 24
# Bugs of one function.
_OF_EACH = 3
_PROGRESS = "progress"
# Run in the world without the package: what of it can be imported or unpacked all the same.
_LOOK = """
import importlib.util, pathlib, sys, zipfile
for name in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is not None:
        print(f"{name}: {found.origin or found.name}")
    for wheel in pathlib.Path(sys.prefix).glob("lib/python3*/ensurepip/_bundled/*.whl"):
        for entry in zipfile.ZipFile(wheel).namelist():
            if f"/_vendor/{name}/" in entry or entry.endswith(f"/_vendor/{name}.py"):
                print(f"{name}: {entry} of {wheel}")
                break
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Most tasks of each kind that are made of a package."""

    deletions: int = 40
    bugs: int = 50
    pairs: int = 10

    def __post_init__(self) -> None:
        if min(self.deletions, self.bugs, self.pairs) < 0 or not self.deletions + self.bugs:
            raise ValueError(
                f"{self.deletions=}, {self.bugs=} and {self.pairs=} must not be negative, and one "
                "of the first two must be above 0"
            )


@dataclasses.dataclass
class Tally:
    """Counts of the tasks made of a package."""

    name: str
    # Functions and classes that tests run, test functions that are used, lines of modules.
    functions: int = 0
    tests: int = 0
    lines: int = 0
    # Numbers of candidates tried, and of those that became tasks, by kind of candidate.
    tried: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    made: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # Numbers of candidates rejected, by reason.
    rejected: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # Reason why no tasks can be made of it; "" otherwise.
    refused: str = ""
    # CPU seconds in sandboxes, and wall-clock seconds, of all runs.
    cpu_s: float = 0.0
    seconds: float = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Counts one line of progress."""
        self.cpu_s += row.get("cpu_s", 0.0)
        self.seconds += row.get("seconds", 0.0)
        if "survey" in row:
            for name in ("functions", "tests", "lines"):
                setattr(self, name, row["survey"][name])
        elif "refused" in row:
            self.refused = row["refused"]
        else:
            self.tried[row["kind"]] += 1
            if row["reason"]:
                self.rejected[row["reason"]] += 1
            else:
                self.made[row["kind"]] += 1


class Maker:
    """Makes the tasks of one package.

    folder: of the whole run. runner: digest of the layer with pytest. Raises PackageError for a
    package that no tasks can be made from, and SandboxFault.
    """

    def __init__(self, pin: Pin, folder: Path, settings: Settings, store: LayerStore, runner: str):
        self.pin = pin
        self.tally = Tally(pin.label)
        self._folder = folder
        self._settings = settings
        self._store = store
        self._runner_layer = runner
        self._path = folder / _PROGRESS / f"{pin.label}.jsonl"
        # Id of a candidate -> its line.
        self._known: dict[str, dict[str, Any]] = {}
        for row in progress(self._path):
            self.tally.add(row)
            if "candidate" in row:
                self._known[row["candidate"]] = row

    def run(self, pool: SandboxPool, stopped: Callable[[], bool]) -> None:
        """Makes all tasks that are not made yet. stopped: whether to leave off."""
        if self.tally.refused or stopped():
            return
        runner = Runner(pool)
        begin = time.monotonic()
        try:
            archive = package.fetch(self.pin, self._folder / "sdists")
            read = package.read(self.pin, archive, self._store, self._runner_layer)
            _refuse_copies(read, pool)
            found = survey(read, runner)
        except PackageError as error:
            self._note({"refused": str(error)}, runner, begin)
            return
        except (SandboxFault, OSError):  # of the machine, and not of the package
            raise
        except Exception as error:  # a package may hold anything: the others go on
            words = f"{self.pin.label}: {type(error).__name__}: {error}"
            self._note({"refused": words[:300]}, runner, begin)
            return
        counts = {
            "functions": len(found.functions) + len(found.classes),
            "tests": len(found.tests),
            "lines": sum(text.count("\n") for text in read.sources.values()),
        }
        self._note({"survey": counts}, runner, begin)
        for kind, most, candidates in self._plan(read, found):
            self._make(read, runner, kind, most, candidates, stopped)
            if stopped():
                return

    def _plan(
        self, read: Package, found: Survey
    ) -> Iterator[tuple[tuple[str, ...], int, Iterable[Candidate]]]:
        """Kinds of candidates, how many tasks of them are wanted, and the candidates."""
        settings = self._settings
        both = list(deletion.candidates(read, found))
        kinds = ("removed", "emptied")
        yield kinds, settings.deletions, (one for one, _ in both)
        # What cannot be removed, because something imports it, is emptied.
        emptied = [two for one, two in both if self._reason(one) == NO_IMPORT]
        yield kinds, settings.deletions, emptied
        single = list(bugs.candidates(read, found, _OF_EACH))
        yield ("bug",), settings.bugs, single
        yield ("bugs",), settings.pairs, self._pairs(single)

    def _reason(self, candidate: Candidate) -> str | None:
        """Reason why a candidate is no task; "" for a task, None if it was not tried."""
        row = self._known.get(candidate.id)
        return None if row is None else row["reason"]

    def _pairs(self, single: Iterable[Candidate]) -> Iterator[Candidate]:
        """Bugs of two files, each of which is a task of its own."""
        good = [one for one in single if self._reason(one) == ""]
        used: set[str] = set()
        for one, other in itertools.combinations(good, 2):
            apart = one.changes[0].path != other.changes[0].path
            if apart and not {one.id, other.id} & used:
                used |= {one.id, other.id}
                yield bugs.pair(one, other)

    def _make(
        self,
        read: Package,
        runner: Runner,
        kinds: tuple[str, ...],
        most: int,
        candidates: Iterable[Candidate],
        stopped: Callable[[], bool],
    ) -> None:
        """Validates candidates until there are as many tasks as wanted."""
        new = (one for one in candidates if one.id not in self._known)
        while not stopped():
            missing = most - sum(self.tally.made[kind] for kind in kinds)
            batch = list(itertools.islice(new, min(_BATCH, max(missing, 0))))
            if not batch:
                return
            begin = time.monotonic()
            fails = {
                (*part,): frozenset(row["fails"])
                for row in self._known.values()
                if row["kind"] == "bug" and row["fails"]
                for part in [_key(row["row"]["changes"][0])]
            }
            spent = runner.cpu_s
            for verdict in validate(read, batch, runner, fails):
                self._note(
                    {
                        "candidate": verdict.candidate.id,
                        "kind": verdict.candidate.kind,
                        "reason": verdict.reason,
                        "fails": list(verdict.fails),
                        "row": verdict.row,
                        "cpu_s": (runner.cpu_s - spent) / len(batch),
                        "seconds": (time.monotonic() - begin) / len(batch),
                    }
                )

    def _note(self, row: dict[str, Any], runner: Runner | None = None, begin: float = 0.0) -> None:
        """Writes a line of progress and counts it."""
        if runner is not None:
            row |= {"cpu_s": runner.cpu_s, "seconds": time.monotonic() - begin}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _end_line(self._path)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.tally.add(row)
        if "candidate" in row:
            self._known[row["candidate"]] = row

    def rows(self) -> list[dict[str, Any]]:
        """All tasks made so far, as lines of a file of tasks."""
        return [row["row"] for row in self._known.values() if not row["reason"]]


def progress(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of progress; none where it is missing. A line that a kill has cut short
    is left out.
    """
    if not path.is_file():
        return
    for line in split_lines(path.read_text(encoding="utf-8")):
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _end_line(path: Path) -> None:
    """Ends a line that a kill has cut short, so that the next one stands alone."""
    if path.is_file() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with open(path, "ab") as file:
            file.write(b"\n")


def _key(change: Mapping[str, Any]) -> tuple[str, int, tuple[str, ...]]:
    """Key of a change: its path, its line and its new lines."""
    return change["path"], change["line"], tuple(change["new"])


def _refuse_copies(read: Package, pool: SandboxPool) -> None:
    """Raises PackageError for a package of which every sandbox has a copy."""
    runner = World(read.world.layers[1:])
    with pool.open({}, runner) as sandbox:
        done = sandbox.run(["python", "-c", _LOOK, *read.names], timeout_s=60.0)
    if done.exit_code or done.stdout.strip():
        raise PackageError(
            f"{read.pin.label}: every sandbox has a copy of it: {done.stdout.strip()[:200]}"
        )
