"""The tasks of a run: those that it trains on, and those of its suites."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.evaluation.suites import SuiteConfig
from rl_code.rollout.engine_config import EngineConfig
from rl_code.run.config import RunConfig
from rl_code.tasks import guards
from rl_code.tasks.api import find_source
from rl_code.tasks.curriculum import Curriculum
from rl_code.tasks.fitting import Fitting
from rl_code.tasks.screening import TaskPool
from rl_code.tasks.source import Source
from rl_code.types import Task


class TaskSets:
    """Tasks, loaded when they are first asked for: not every evaluation needs those of training.

    length: tokens of a task's prompt by a protocol.
    """

    def __init__(
        self,
        config: RunConfig,
        pool: SandboxPool,
        workdir: Path,
        length: Callable[[Task, Named], int],
    ):
        self._config, self._pool, self._workdir, self._length = config, pool, workdir, length
        self._suites: dict[str, list[Task]] = {}

    @functools.cached_property
    def training(self) -> Sequence[Task]:
        """The training tasks. Those whose prompt does not fit are left out here, or of an endless
        source when steps are planned.
        """
        source = find_source(self._config.tasks, "config.tasks")
        if source.endless:  # which cannot be gone through
            return source.load(self._pool, self._workdir)
        found = list(self.fits_training.of(source.one_by_one(self._pool, self._workdir)))
        if not found:
            raise self.fits_training.none()
        if self._config.train.forgeable:
            return found
        kept = list(guards.kept(found, self._pool, self._workdir))
        if not kept:
            raise ConfigError(
                "config.tasks: the results of all tasks can be forged without a guess; the log "
                "says why, and config.train.forgeable=True trains on them"
            )
        return kept

    @functools.cached_property
    def fits_training(self) -> Fitting:
        """The check of the training tasks."""
        config = self._config
        source = find_source(config.tasks, "config.tasks")
        return self._fitting("config.tasks", source, config.protocol, config.rollout.engine)

    @functools.cached_property
    def demonstrated(self) -> Sequence[Task]:
        """The tasks that demonstrations are made of."""
        path, named = self._config.demonstrated()
        if path == "tasks":
            return self.training
        return find_source(named, f"config.{path}").load(self._pool, self._workdir)

    def of_suite(self, suite: SuiteConfig) -> list[Task]:
        """The tasks of a suite."""
        if suite.name not in self._suites:
            engine = suite.engine or self._config.rollout.engine
            protocol = suite.protocol or self._config.protocol
            source = find_source(suite.tasks, f"suites.{suite.name}.tasks")
            fits = self._fitting(f"suite {suite.name!r}", source, protocol, engine)
            chosen = suite.choose(
                fits.of(source.one_by_one(self._pool, self._workdir)),
                lambda task: self._length(task, protocol),
                f"have a prompt of at most {engine.prompt_length} tokens",
            )
            if not chosen:
                raise fits.none()
            self._suites[suite.name] = chosen
        return self._suites[suite.name]

    def check_held_out(self) -> None:
        """Raises ConfigError if a suite has tasks of training. Tasks without end have no ids that
        could be gone through; their splits are apart by construction.
        """
        if find_source(self._config.tasks, "config.tasks").endless:
            return
        training = {task.id for task in self.training}
        for suite in self._config.suites:
            if find_source(suite.tasks, f"suites.{suite.name}.tasks").endless:
                continue
            shared = [task.id for task in self.of_suite(suite) if task.id in training]
            if shared:
                raise ConfigError(
                    f"suite {suite.name!r}: {len(shared)} of its "
                    f"{len(self.of_suite(suite))} tasks are training tasks too, such as "
                    f"{shared[0]!r}, so it would measure what was learned by heart; give "
                    "config.tasks and the suite different splits (for rows of one's own the "
                    "column of columns.split says which), or different files"
                )

    def pool(self, position: Mapping[str, Any] | None) -> TaskPool:
        """Pool of tasks that training draws from, by the config. position: as of ``TaskPool``."""
        train = self._config.train
        seed = self._config.seed
        if train.curriculum is None:
            return TaskPool(
                len(self.training), seed, train.screening, position, shuffled=train.shuffled
            )
        try:
            return Curriculum(self.training, seed, train.curriculum, train.group_size, position)
        except ValueError as error:
            raise ConfigError(f"config.train.{error}") from error

    def _fitting(self, what: str, source: Source, protocol: Named, engine: EngineConfig) -> Fitting:
        """The check of a source's prompts. engine: reads them."""
        own = self._config.harness is None  # else the agent writes the prompts
        length = (lambda task: self._length(task, protocol)) if own else None
        return Fitting(what, engine.prompt_length, length, endless=source.endless)
