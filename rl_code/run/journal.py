"""Journal of the learner: the numbers of each step, and a line of progress."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_code.config import read_config
from rl_code.metrics.progress import Progress
from rl_code.metrics.values import CompilationCounter
from rl_code.metrics.writers import MetricLog
from rl_code.run.run import Run
from rl_code.run.step_metrics import episode_metrics, extra_metrics, taught
from rl_code.store.group_records import GroupRecord
from rl_code.types import Group

# Steps in a row without a group to learn from after which a line says so; then after twice as many.
_SILENT_STEPS = 3


class Journal:
    """Writes into the run's folder for this process. A context manager.

    start: the first step that will be written. What was written for this and later steps is
    dropped.
    """

    def __init__(self, run: Run, start: int):
        self._extra = run.config.metrics.extra_functions()
        self._stops = run.config.metrics.on_error == "stop"
        self._stack = contextlib.ExitStack()
        writers = run.config.metrics.open_settings()
        config = read_config.to_dict(run.config)
        self._metrics = self._stack.enter_context(MetricLog(run.journal, start, writers, config))
        self.progress = self._stack.enter_context(
            Progress("training", run.config.train.steps, start)
        )
        self._silent = 0  # steps in a row in which nothing was taught
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
        metrics |= extra_metrics(self._extra, groups, metrics, stops=self._stops)
        self._metrics.write(step, metrics)
        malformed = metrics["episode/malformed_calls"]
        self.progress.update(
            step + 1,
            reward=metrics["reward/total"],
            pass_rate=metrics["reward/solved"],
            signal=metrics["reward/signal_groups"],
            **({"malformed": malformed} if malformed else {}),
            tokens_per_s=metrics["time/tokens_per_s"],
        )
        self._warn_of_silence(metrics)
        return metrics

    def _warn_of_silence(self, metrics: Mapping[str, Any]) -> None:
        """Says so when nothing has been taught for some steps in a row."""
        self._silent = 0 if taught(metrics) else self._silent + 1
        times = self._silent / _SILENT_STEPS
        if times < 1 or not math.log2(times).is_integer():
            return
        self.progress.note(
            f"training learns nothing: in {self._silent} steps no group had rewards that differ "
            f"(solved {metrics['reward/solved']:.0%}, reward {metrics['reward/total']:.2f}, "
            f"{metrics['episode/malformed_calls']:.1f} malformed calls per episode). "
            "docs/no_reward.md says what to look at"
        )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
