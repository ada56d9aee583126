"""Tasks of a suite that were trained on: the same task, nearly the same, or the same code base."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rl_code.evaluation.suite import SuiteResult
from rl_code.tasks.deduplicate import DuplicateConfig, near_duplicates
from rl_code.types import Task

# From which similarity on two tasks count as one, as for MBPP against HumanEval.
SIMILAR = DuplicateConfig(words=0.8, code=0.8)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """A task of a suite, a training task that it is like, and in what."""

    task: str
    other: str
    why: str


def overlaps(
    tasks: Sequence[Task], training: Sequence[Task], config: DuplicateConfig = SIMILAR
) -> list[Overlap]:
    """For each of the tasks that is in training, one training task and the reason.

    Reasons, the first that holds: the id; repository and commit; text and reference, as
    ``deduplicate`` compares them.
    """
    ids = {other.id for other in training}
    commits = {place: other.id for other in training if (place := _commit(other))}
    found = {}
    for task in tasks:
        place = _commit(task)
        if task.id in ids:
            found[task.id] = Overlap(task.id, task.id, "the same id")
        elif place in commits:
            found[task.id] = Overlap(task.id, commits[place], "the same repository and commit")
    left = [task for task in tasks if task.id not in found]
    for pair in near_duplicates(left, training, config):
        why = f"words alike to {pair.words:.0%}, code to {pair.code:.0%}"
        found[pair.task] = Overlap(pair.task, pair.other, why)
    return [found[task.id] for task in tasks if task.id in found]


def without(result: SuiteResult, found: Sequence[Overlap]) -> SuiteResult | None:
    """The result on the tasks that are not in training; None where all are."""
    gone = {overlap.task for overlap in found}
    kept = tuple(task for task in result.tasks if task.id not in gone)
    return dataclasses.replace(result, tasks=kept) if kept else None


def _commit(task: Task) -> tuple[str, str] | None:
    """Repository and commit that a task starts from; None for a task without."""
    commit = task.meta.get("base_commit")
    return (str(task.meta.get("repository", "")), str(commit)) if commit else None
