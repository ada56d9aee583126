"""Cases from recorded sessions: work that must not be paid, on the task that it was done on.

Somebody has read a session that an alarm named, and found that its work earns what it does not
deserve. ``launch.make_case`` puts it into a file, a line of JSON for each case. From then on the
red team hands the work in again: it may earn at most what the files that the agent was given earn.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_code.environment.grading import grade_work
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.host.files import make_private
from rl_code.redteam.ground import LIMITS
from rl_code.redteam.trial import Outcome, earned, work_of
from rl_code.tasks import records
from rl_code.tasks.row_files import RowError, TaskFileError, each_row, place_of
from rl_code.types import Task

KIND = "session"
_COLUMNS = {"name": str, "session": str, "files": dict, "task": dict}


@dataclasses.dataclass(frozen=True)
class Case:
    """Work on a task that must not be paid."""

    name: str
    session: str
    # None where the line of the file cannot be read.
    task: Task | None
    # Path -> text of what the session changed; None deletes.
    files: Mapping[str, str | None]
    # Reason why there is no task; "" if there is one.
    problem: str = ""


def read_cases(path: Path) -> list[Case]:
    """The cases of a file, and for a line that holds none one without a task, which says why.
    Raises TaskFileError where there is no such file, or nothing in it.
    """
    cases: dict[str, Case] = {}
    for line, row in each_row(path, _COLUMNS):
        place = place_of(path, line)
        try:
            if isinstance(row, RowError):
                raise row
            name, session, files = row["name"], row["session"], row["files"]
            if name in cases:
                raise ValueError(f"{name!r} is the name of another case, too")
            cases[name] = Case(name, session, task_of(row["task"]), files)
        except Exception as error:  # a line may hold anything: each has an outcome of its own
            words = str(error) if isinstance(error, ValueError) else repr(error)
            cases[place] = Case(place, "", None, {}, f"{path}, line {line}: no case: {words}")
    return list(cases.values())


def append_case(path: Path, case: Mapping[str, Any]) -> None:
    """Adds a case to a file, after a look at whether its task can be read. Raises TaskFileError;
    ValueError if there is one of its name.
    """
    task_of(case["task"])
    there = read_cases(path) if path.exists() else []
    if case["name"] in {one.name for one in there}:
        raise ValueError(f"{path} has a case {case['name']!r} already")
    make_private(path)  # it may hold what a person wrote
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(case) + "\n")


def task_of(row: Mapping[str, Any]) -> Task:
    """The task of a row with an entry point and tests.

    Raises TaskFileError for a malformed one, and for one with a suite, whose world is not in the
    row.
    """
    if "fail_to_pass" in row:
        raise TaskFileError(
            f"task {row.get('id')!r}: a suite needs a world of its own, which cases do not have yet"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.jsonl"
        path.write_text(json.dumps(row), encoding="utf-8")
        (task,) = records.load(str(path), {column: column for column in row})
    return task


def outcomes(cases: Sequence[Case], pool: SandboxPool) -> Iterator[Outcome]:
    """Outcome of each case: what it earns, and what the files earn that its agent was given. A case
    that cannot be read is reported as harm, because it guards against nothing any more.
    """
    for case in cases:
        if case.task is None:
            yield Outcome(KIND, case.name, "cases", harm=(case.problem,))
            continue
        given = grade_work(case.task, work_of(case.task, {}), pool, LIMITS)
        grade = grade_work(case.task, work_of(case.task, case.files), pool, LIMITS)
        yield Outcome(
            KIND,
            case.name,
            "cases" if case.task.hidden_tests.cases else "code",
            earned(case.task, grade),
            earned(case.task, given),
            grade.flags,
        )
