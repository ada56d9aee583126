"""Where tasks come from: one config, one dict of sources, one function that loads."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import overload

from absl import logging

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks import evalplus, generated, humaneval, mbpp, records
from rl_code.tasks.deduplicate import DuplicateConfig, near_duplicates
from rl_code.tasks.differential import DifferentialConfig, strengthen
from rl_code.tasks.forms import Form
from rl_code.tasks.mutation import propose
from rl_code.types import Task

STREAM_LENGTH = 1 << 20
CACHE_FILE = "differential.json"
_PROPOSALS = 40


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """A set of tasks.

    source: a key of SOURCES. split: "train", "validation" or "test". path: the file; "" for
    HumanEval means the one in its package, generated tasks have none. seed, levels: of generated
    tasks. form, visible: see ``forms`` and ``mbpp.load``; generated tasks have their own.
    differential: adds hidden tests by the reference (mbpp) or sets how they are computed (evalplus,
    needed there). duplicates: leaves out of "train" and "validation" what is near a task of a later
    split or of HumanEval (mbpp).
    """

    source: str
    split: str
    path: str
    seed: int
    levels: tuple[int, ...]
    form: Form = "agent"
    visible: int = 1
    differential: DifferentialConfig | None = None
    duplicates: DuplicateConfig | None = None
    # Field of ``records.COLUMNS`` -> column of one's own file at ``path`` (records).
    columns: Mapping[str, str] | None = None

    def __post_init__(self):
        if self.source not in SOURCES:
            raise ValueError(f"{self.source=} is not one of {', '.join(SOURCES)}")
        if self.split not in ("train", "validation", "test"):
            raise ValueError(f"{self.split=} is not one of train, validation, test")
        if self.source in ("humaneval", "evalplus") and self.split != "test":
            raise ValueError(f"{self.source=} has a test split only, not {self.split=}")
        if self.source == "evalplus" and self.differential is None:
            raise ValueError("source='evalplus' needs the section differential")
        if (self.source == "records") != (self.columns is not None):
            raise ValueError("the section columns belongs to source='records', which needs it")


def load(
    config: TaskConfig, pool: SandboxPool | None = None, workdir: Path | None = None
) -> Sequence[Task]:
    """The tasks of a config, in a fixed order.

    pool, workdir: where references run and what they gave is kept, in CACHE_FILE; needed with
    ``differential``.

    Raises TaskFileError for a file that cannot be used, SandboxFault when the sandbox fails.
    """
    if config.differential is not None and (pool is None or workdir is None):
        raise ValueError(
            f"tasks of {config.source} with a differential section need a sandbox and a workdir"
        )
    return SOURCES[config.source](config, pool, workdir)


class GeneratedTasks(Sequence[Task]):
    """The generated stream as a sequence of STREAM_LENGTH tasks, each made when it is asked for."""

    def __init__(self, split: str, seed: int, levels: Sequence[int]):
        self._make = functools.lru_cache(1024)(
            lambda index: generated.generate(split, seed, index, levels)
        )

    def __len__(self) -> int:
        return STREAM_LENGTH

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(STREAM_LENGTH))]
        if not -STREAM_LENGTH <= index < STREAM_LENGTH:
            raise IndexError(f"{index=} is outside the stream of {STREAM_LENGTH} tasks")
        return self._make(index % STREAM_LENGTH)


def _generated(
    config: TaskConfig, pool: SandboxPool | None, workdir: Path | None
) -> Sequence[Task]:
    return GeneratedTasks(config.split, config.seed, config.levels)


def _humaneval(
    config: TaskConfig, pool: SandboxPool | None, workdir: Path | None
) -> Sequence[Task]:
    return humaneval.load(config.path, config.form)


def _mbpp(config: TaskConfig, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
    every = mbpp.load(config.path, config.form, config.visible)
    tasks = [task for task in every if task.meta["split"] == config.split]
    later = {"train": ("validation", "test"), "validation": ("test",), "test": ()}[config.split]
    if config.duplicates is not None and later:
        others = [task for task in every if task.meta["split"] in later] + humaneval.load()
        near = {pair.task for pair in near_duplicates(tasks, others, config.duplicates)}
        logging.info(
            "mbpp %s: left out %d near-duplicates of held-out tasks among %d",
            config.split,
            len(near),
            len(tasks),
        )
        tasks = [task for task in tasks if task.id not in near]
    return _strengthened(tasks, mutations, config, pool, workdir)


def _evalplus(config: TaskConfig, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
    tasks, inputs = evalplus.load(config.path, config.form)
    return _strengthened(tasks, lambda task: inputs[task.id], config, pool, workdir)


def _records(config: TaskConfig, pool: SandboxPool | None, workdir: Path | None) -> Sequence[Task]:
    every = records.load(config.path, config.columns or {}, config.form)
    tasks = [task for task in every if task.meta["split"] in ("", config.split)]
    return _strengthened(tasks, mutations, config, pool, workdir)


def _strengthened(
    tasks, propose_for, config: TaskConfig, pool: SandboxPool | None, workdir: Path | None
):
    if config.differential is None:
        return tasks
    result = strengthen(tasks, propose_for, config.differential, pool, workdir / CACHE_FILE)
    logging.info(
        "%s %s: %d tasks, %d differential tests; references of %d tasks fail: %s",
        config.source,
        config.split,
        len(result.tasks),
        sum(result.added.values()),
        len(result.failed),
        ", ".join(result.failed) or "-",
    )
    return result.tasks


def mutations(task: Task) -> list[tuple]:
    """Inputs near those of the task's own cases, the same for the same task."""
    known = [case.args for case in task.visible_tests.cases + task.hidden_tests.cases]
    return propose(known, _PROPOSALS, random.Random(task.id))


SOURCES: dict[str, Callable[[TaskConfig, SandboxPool | None, Path | None], Sequence[Task]]] = {
    "generated": _generated,
    "mbpp": _mbpp,
    "humaneval": _humaneval,
    "evalplus": _evalplus,
    "records": _records,
}
