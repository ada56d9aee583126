"""The result of a suite of tasks, task by task: built from trajectories, kept as JSON.

A result lies in ``evaluations/<suite>.<label>.json`` of the working directory and holds

  suite, label, step  what was run, on which weights ("before", "after"), and their step of training
  sampling            temperature and whatever else describes how tokens were drawn
  tasks               one ``TaskResult`` per task
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from rl_code.environment.finished import CHEATS, Usage
from rl_code.evaluation.passk import Interval, mean_interval, pass_at_k
from rl_code.host.files import write_atomically
from rl_code.types import Group, Trajectory

FOLDER = "evaluations"


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """Outcomes of one task's samples; the fields are those of the file."""

    id: str
    # Samples, those lost to the sandbox included.
    n: int
    correct: int
    # None where the agent has no tool that edits. What commands change is not known edit by edit.
    first_edit_correct: int | None
    # Malformed calls of all samples together.
    malformed: int
    # Sampled tokens per episode.
    mean_tokens: float
    # Samples lost to the sandbox. They count as failures.
    faults: int = 0
    # Well-formed calls of all samples together, and wall-clock seconds of tools and grading per
    # episode; None in files that were written before these were counted.
    calls: int | None = None
    mean_seconds: float | None = None
    # Samples that the grader proved to cheat, which are not solved; None likewise.
    cheats: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.n or not 0 <= (self.first_edit_correct or 0) <= self.n:
            raise ValueError(
                f"task {self.id}: {self.correct=} and {self.first_edit_correct=} must be in [0, "
                f"{self.n=}]"
            )


@dataclasses.dataclass(frozen=True)
class SuiteResult:
    """One suite on one set of weights. Ids of tasks are unique."""

    suite: str
    label: str
    step: int
    sampling: Mapping[str, Any]
    tasks: tuple[TaskResult, ...]

    def __post_init__(self) -> None:
        repeated = [id for id, count in collections.Counter(self.ids).items() if count > 1]
        if not self.tasks:
            raise ValueError(f"suite {self.suite!r}: no task was played")
        if repeated:
            raise ValueError(
                f"suite {self.suite!r}: needs tasks with unique ids, repeated: {_some(repeated)}"
            )

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(task.id for task in self.tasks)

    @property
    def largest_k(self) -> int:
        """The largest k for which pass@k can be estimated on every task."""
        return min(task.n for task in self.tasks)

    @property
    def knows_first_edits(self) -> bool:
        """True if each task says how many first edits are right, of one sample or more."""
        return self.largest_k > 0 and all(t.first_edit_correct is not None for t in self.tasks)

    def pass_at(self, k: int, *, first_edit: bool = False) -> list[float]:
        """pass@k of each task, in the order of ``tasks``; with ``first_edit``, of the first edit
        graded alone.

        Raises ValueError naming the tasks that have fewer than k samples, and where first edits are
        asked for and not known.
        """
        short = [f"{task.id} ({task.n})" for task in self.tasks if task.n < k]
        if short:
            raise ValueError(
                f"pass@{k} of suite {self.suite!r}: fewer than {k} samples of {_some(short)}"
            )
        counts = [t.first_edit_correct if first_edit else t.correct for t in self.tasks]
        if None in counts:
            raise ValueError(
                f"suite {self.suite!r}: first edits are not known of an agent without a tool that "
                "edits"
            )
        return [pass_at_k(t.n, right, k) for t, right in zip(self.tasks, counts, strict=True)]

    def interval(self, k: int, *, first_edit: bool = False) -> Interval:
        """pass@k with its 95 % interval over tasks."""
        return mean_interval(self.pass_at(k, first_edit=first_edit))

    def per_episode(self, field: str) -> float | None:
        """Mean per episode of "malformed" calls, sampled "tokens", well-formed "calls", "seconds"
        of tools and grading, or "cheats", the share of episodes that were proved to cheat.

        0 when there are no episodes; None where a task's result does not say.
        """
        totals = {
            "malformed": lambda task: task.malformed,
            "tokens": lambda task: task.mean_tokens * task.n,
            "calls": lambda task: task.calls,
            "seconds": lambda task: (
                None if task.mean_seconds is None else task.mean_seconds * task.n
            ),
            "cheats": lambda task: task.cheats,
        }
        counts = [totals[field](task) for task in self.tasks]
        if None in counts:
            return None
        episodes = sum(task.n for task in self.tasks)
        return sum(counts) / episodes if episodes else 0.0

    def save(self, workdir: str | os.PathLike[str]) -> Path:
        """Writes the file and returns its path. Raises OSError, leaving no part of it, when the
        disk is full.
        """
        path = Path(workdir) / FOLDER / f"{self.suite}.{self.label}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode())
        return path


def load(path: str | os.PathLike[str]) -> SuiteResult:
    """Reads what ``SuiteResult.save`` wrote. Raises ValueError naming the file when it is something
    else.
    """
    try:
        fields = json.loads(Path(path).read_text())
        return SuiteResult(
            **{**fields, "tasks": tuple(TaskResult(**task) for task in fields["tasks"])}
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not the result of a suite: {error}") from error


def load_all(workdir: str | os.PathLike[str]) -> list[SuiteResult]:
    """Every result of a working directory, by suite and then by step of training."""
    results = [load(path) for path in sorted((Path(workdir) / FOLDER).glob("*.json"))]
    return sorted(results, key=lambda result: (result.suite, result.step))


def from_groups(
    suite: str,
    label: str,
    step: int,
    sampling: Mapping[str, Any],
    groups: Sequence[Group],
) -> SuiteResult:
    """Counts the episodes of a suite; groups of the same task are added up, faults are counted
    apart.
    """
    samples: dict[str, list[Trajectory]] = {}
    for group in groups:
        samples.setdefault(group.task.id, []).extend(group.trajectories)
    return SuiteResult(
        suite,
        label,
        step,
        dict(sampling),
        tuple(_count(id, found) for id, found in samples.items()),
    )


def tables(results: Sequence[SuiteResult], ks: Sequence[int]) -> rich.console.Group:
    """Tables of solved tasks and, below, of their cost. Two tables, since one would be wider than
    most terminals.
    """
    return rich.console.Group(table(results, ks), costs(results))


def table(results: Sequence[SuiteResult], ks: Sequence[int]) -> rich.table.Table:
    """One row per result: pass@k with 95 % intervals, and the first edit alone.

    A k that a result has too few samples for is shown as "-", and so is the first edit of an agent
    without a tool that edits.
    """
    view = rich.table.Table(
        caption="in %, with 95 % bootstrap intervals over tasks", caption_justify="left"
    )
    for name in ("suite", "weights", "tasks"):
        view.add_column(name, justify="right" if name == "tasks" else "left")
    for name in (*(f"pass@{k}" for k in ks), "first edit pass@1"):
        view.add_column(name, justify="right")
    for result in results:
        cells = [percent(result.interval(k)) if k <= result.largest_k else "-" for k in ks]
        first = "-"
        if result.knows_first_edits:
            first = percent(result.interval(1, first_edit=True))
        view.add_row(result.suite, result.label, str(len(result.tasks)), *cells, first)
    return view


def costs(results: Sequence[SuiteResult]) -> rich.table.Table:
    """One row per result, of an episode on average: sampled tokens, well-formed and malformed
    calls, seconds of tools and grading; and the share of episodes that were proved to cheat.
    """
    view = rich.table.Table(
        caption="of an episode, on average: sampled tokens, well-formed calls, malformed ones, "
        "seconds of tools and grading; cheats: the share of episodes that were proved to cheat",
        caption_justify="left",
    )
    view.add_column("suite")
    view.add_column("weights")
    columns = {
        "tokens": "{:.0f}",
        "calls": "{:.1f}",
        "malformed": "{:.2f}",
        "seconds": "{:.2f}",
        "cheats": "{:.1%}",
    }
    for name in columns:
        view.add_column(name, justify="right")
    for result in results:
        means = [_mean(result, name, form) for name, form in columns.items()]
        view.add_row(result.suite, result.label, *means)
    return view


def curve(results: Sequence[SuiteResult]) -> rich.table.Table:
    """pass@k for k = 1, 2, 4, ... up to the samples of each task, a row for each k."""
    view = rich.table.Table(
        caption="pass@k in %, with 95 % bootstrap intervals over tasks", caption_justify="left"
    )
    view.add_column("k", justify="right")
    for result in results:
        view.add_column(f"{result.suite} {result.label}", justify="right")
    for k in doublings(max(result.largest_k for result in results)):
        cells = [
            percent(result.interval(k)) if k <= result.largest_k else "-" for result in results
        ]
        view.add_row(str(k), *cells)
    return view


def doublings(most: int) -> list[int]:
    """1, 2, 4, ... below ``most``, and ``most`` itself; none for 0."""
    found = []
    k = 1
    while k < most:
        found.append(k)
        k *= 2
    return [*found, most] if most else []


def _mean(result: SuiteResult, field: str, form: str) -> str:
    value = result.per_episode(field)
    return "-" if value is None else form.format(value)


def percent(interval: Interval, *, signed: bool = False) -> str:
    """An interval of fractions as "41.2 [38.0, 44.1]", in percent."""
    sign = "+" if signed else ""
    mean, low, high = (f"{100 * x:{sign}.1f}" for x in dataclasses.astuple(interval))
    return f"{mean} [{low}, {high}]"


def _count(id: str, samples: Sequence[Trajectory]) -> TaskResult:
    """Counts every sample. One that was lost to the sandbox is not solved: if it were left out, a
    policy could raise its pass rate by losing the samples that fail.
    """
    lost = [sample.status == "fault" for sample in samples]
    tokens = [int(sample.sampled.sum()) for sample in samples]
    calls = [sum(Usage.of(sample).calls.values()) for sample in samples]
    seconds = [sum(sample.seconds.values()) for sample in samples]
    cheats = [not CHEATS.isdisjoint(sample.reward.flags) for sample in samples]
    first = [sample.first_edit_passed for sample in samples]
    return TaskResult(
        id=id,
        n=len(samples),
        correct=sum(sample.solved for sample in samples),
        first_edit_correct=None if None in first else sum(first),
        malformed=sum(sample.malformed_calls for sample in samples),
        mean_tokens=sum(tokens) / len(tokens) if tokens else 0.0,
        faults=sum(lost),
        calls=sum(calls),
        mean_seconds=sum(seconds) / len(seconds) if seconds else 0.0,
        cheats=sum(cheats),
    )


def _some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return (
        ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        if names
        else "none"
    )
