"""Evaluations of held-out suites while training goes on.

They are played by the learner after a step's weights are published, with these weights, and before
the step is written down. The next update waits for them. Actors do not: those in other processes
and the actor in another thread of this process go on sampling what is planned, and then wait for
the next plan. With one process and "sync" nothing else runs meanwhile.

An evaluation draws from random keys of its own, so training comes to the same weights, bit for bit,
with and without it. Each suite's result is written when it is complete. A run that was killed in
between plays only the suites that have no result yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rl_code.config.read_config import ConfigError, at_least
from rl_code.evaluation.suite import SuiteResult
from rl_code.evaluation.suites import SuiteConfig

METRICS = "eval/"


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Evaluations while training goes on, beside those before and after it."""

    # Steps of training between two evaluations.
    every: int
    # The names of the suites that are played; None for all.
    suites: tuple[str, ...] | None = None
    # Episodes of each task; None for as many as the suite says. Evaluations before and after
    # training have as many as the suite says.
    samples: int | None = None

    def __post_init__(self):
        at_least(self, every=1, samples=1)

    def due(self, suites: Sequence[SuiteConfig], step: int, last: int) -> list[SuiteConfig]:
        """The suites that are played after ``step`` steps of ``last``: those after the last step as
        after any run, since they are its result.
        """
        if step == last:
            return list(suites)
        return self.chosen(suites) if step % self.every == 0 else []

    def chosen(self, suites: Sequence[SuiteConfig]) -> list[SuiteConfig]:
        """The suites that are played during training."""
        found = [suite for suite in suites if self.suites is None or suite.name in self.suites]
        if self.samples is None:
            return found
        return [dataclasses.replace(suite, samples=self.samples) for suite in found]


def check(config: EvaluateConfig | None, suites: Sequence[SuiteConfig], best: str | None) -> None:
    """Raises ConfigError for suites that are not there, and for a best checkpoint that is chosen by
    a metric which no evaluation gives.

    best: ``checkpoint.best``.
    """
    names = [suite.name for suite in suites]
    if config is not None:
        unknown = [name for name in config.suites or () if name not in names]
        if unknown or not suites or config.suites == ():
            raise ConfigError(
                f"config.evaluate.suites = {config.suites!r}: expected names of config.suites, "
                f"which are {', '.join(names) or 'none'}"
            )
    if best is None or not best.startswith(METRICS):
        return
    if config is None:
        raise ConfigError(f"config.checkpoint.best = {best!r}: config.evaluate = None")
    known = [name for suite in config.chosen(suites) for name in names_of(suite)]
    if best not in known:
        raise ConfigError(
            f"config.checkpoint.best = {best!r}: config.evaluate gives {', '.join(known)}"
        )


def names_of(suite: SuiteConfig) -> list[str]:
    """The metrics of a suite that a checkpoint may be chosen by."""
    return [f"{METRICS}{suite.name}/pass@{k}" for k in sorted({1, suite.samples})]


def metrics(results: Sequence[SuiteResult], samples: int | None = None) -> dict[str, float]:
    """pass@1 and pass@k of each suite, with the ends of their 95 % intervals, and the share of
    episodes that were proved to cheat.

    samples: the k, where a result has so many samples of each task; all samples unless given.
    """
    found = {}
    for result in results:
        for k in sorted({1, min(samples or result.largest_k, result.largest_k)}):
            name = f"{METRICS}{result.suite}/pass@{k}"
            interval = result.interval(k)
            found[name] = interval.mean
            found[f"{name}_low"] = interval.low
            found[f"{name}_high"] = interval.high
        cheats = result.per_episode("cheats")
        if cheats is not None:
            found[f"{METRICS}{result.suite}/cheats"] = cheats
    return found
