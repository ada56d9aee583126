"""What the learner writes down of each step: numbers, and a line of progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_code import read_config
from rl_code.metric_writers import MetricLog
from rl_code.metrics import CompilationCounter
from rl_code.progress import Progress
from rl_code.run import Run
from rl_code.step_metrics import episode_metrics, extra_metrics
from rl_code.store.group_records import GroupRecord
from rl_code.types import Group


class Journal:
    """Writes into the run's folder for this process. A context manager.

    start: the first step that will be written. What was written for this and later steps is
    dropped.
    """

    def __init__(self, run: Run, start: int):
        self._extra = run.config.metrics.extra_functions()
        self._stack = contextlib.ExitStack()
        writers = run.config.metrics.open_settings()
        config = read_config.to_dict(run.config)
        self._metrics = self._stack.enter_context(MetricLog(run.journal, start, writers, config))
        self.progress = self._stack.enter_context(
            Progress("training", run.config.train.steps, start)
        )
        self._compilations = self._stack.enter_context(CompilationCounter())

    def while_screening(
        self, step: int, wait: Callable[..., Sequence[GroupRecord]]
    ) -> Callable[..., Sequence[GroupRecord]]:
        """``wait``, which also shows that tasks are being screened for a step."""

        def waiting(of: int, numbers: Sequence[int]) -> Sequence[GroupRecord]:
            self.progress.update(step, screening=f"{len(numbers)} tasks for step {of}")
            return wait(of, numbers)

        return waiting

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        learner: Mapping[str, Any],
        rest: Mapping[str, Any],
        seconds: float,
    ) -> dict[str, Any]:
        """Writes a step that was trained on, and returns all its metrics.

        learner: metrics of the update. rest: all others. seconds: that the whole step took.
        Raises OSError when the disk is full.
        """
        metrics = episode_metrics(groups, step) | learner | rest
        metrics["time/tokens_per_s"] = metrics["rollout/sampled_tokens"] / seconds
        metrics["time/compilations"] = self._compilations.count
        metrics |= extra_metrics(self._extra, groups, metrics)
        self._metrics.write(step, metrics)
        self.progress.update(
            step + 1,
            reward=metrics["reward/total"],
            pass_rate=metrics["reward/solved"],
            tokens_per_s=metrics["time/tokens_per_s"],
        )
        return metrics

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
