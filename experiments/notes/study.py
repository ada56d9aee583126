"""Idle time, and then the same tasks with its notes and without.

In idle time the model walks through each repository once, as an episode like any other. What its
calls stored is what tasks may recall: ``note_book`` reads it from the record of the episode as it
does in training, and no note is mended or added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.notes.repositories import Repository, generate, idle, note, reminded, request
from experiments.tab.held_out import SEED, fill
from models.transformer import Transformer
from rl_code.environment.notes import with_notes
from rl_code.rollout.note_book import notes_after
from rl_code.run.run import Run
from rl_code.types import Group

VARIANTS = ("without notes", "with notes")


@dataclasses.dataclass(frozen=True)
class Compared:
    """Results of one model; R repositories, M tasks of each, 2 variants as in ``VARIANTS``."""

    # int [R, 2], tokens that a walk in idle time sampled and read.
    walks: np.ndarray
    # int [2, R, M, 2], tokens that an episode sampled and read.
    tokens: np.ndarray
    # bool [2, R, M]
    solved: np.ndarray
    # Share of the functions of all repositories with a note that is right in every line.
    right: float


def compare(run: Run, model: Transformer, repositories: int, tasks: int) -> Compared:
    """Walks through so many repositories, and plays so many tasks on each, in both variants."""
    settings = run.config.tasks.settings
    # a split that no demonstration is of
    chosen = [generate("test", SEED, i, settings["files"]) for i in range(repositories)]
    sampler = run.sampler(model)
    walks = fill(run, sampler, [idle(one) for one in chosen], 1)
    kept = [notes_after(group, run.tools, {}) for group in walks]
    plain = [request(one, number) for one in chosen for number in range(tasks)]
    owner = np.repeat(np.arange(repositories), tasks)
    noted = [
        with_notes(reminded(task), kept[at]) if kept[at] else task
        for task, at in zip(plain, owner, strict=True)
    ]
    groups = fill(run, sampler, [*plain, *noted], 1)
    shape = len(VARIANTS), repositories, tasks
    return Compared(
        walks=np.array([spent(group) for group in walks]),
        tokens=np.array([spent(group) for group in groups]).reshape(*shape, 2),
        solved=np.array([group.trajectories[0].solved for group in groups]).reshape(shape),
        right=right(chosen, kept),
    )


def right(repositories: Sequence[Repository], kept: Sequence[dict[str, str]]) -> float:
    """The share of functions whose note is right in every line."""
    found = [
        notes.get(function.name) == note(repository, at)
        for repository, notes in zip(repositories, kept, strict=True)
        for at, function in enumerate(repository.functions)
    ]
    return float(np.mean(found))


def spent(group: Group) -> tuple[int, int]:
    """Tokens that the episode of a group sampled, and that it read: its prompt and answers."""
    sampled = group.trajectories[0].sampled
    return int(sampled.sum()), int((~sampled).sum())
