"""Makes the runs of a sweep forks of one run at one step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from rl_code import derive, lineage, read_config
from rl_code.evaluation import suite
from rl_code.evaluation.suite import SuiteResult
from rl_code.recording import kept_config
from rl_code.run_config import RunConfig
from rl_code.workdir import CONFIG_FILE

FORK = (sys.executable, "-m", "launch.fork")


class ForkFailed(RuntimeError):
    """A run could not be forked; the program that tried has said why."""


def check(parent: Path, config: RunConfig, changed: Collection[str]) -> None:
    """Raises ConfigError where a run's config is not that of the run that is forked.

    changed: keys that the fork changes. What follows from them may differ too; the fork derives it
    again.
    """
    without = (*changed, *derive.WHY)
    if keys := read_config.diff(kept_config.read(parent), config, without=without):
        raise read_config.ConfigError(
            f"--fork={parent} is a run of another config than the sweep's: {', '.join(keys)} "
            "differ; give --config.<key>=<value>, or another --config"
        )


def fork(parent: Path, step: int | None, workdir: Path, changes: Sequence[str]) -> None:
    """Makes a workdir a fork, unless it is one.

    step: the first step of its own; None for the newest checkpoint's. changes: overrides of the
    parent's config, as on a command line. Raises ForkFailed.
    """
    if (workdir / CONFIG_FILE).exists():
        return
    at = [] if step is None else [f"--step={step}"]
    command = [*FORK, str(parent), *at, f"--workdir={workdir}", *changes]
    if subprocess.run(command).returncode:
        raise ForkFailed(f"{workdir} could not be forked from {parent}; it says why above")


def evaluations(workdir: Path) -> list[SuiteResult]:
    """Results of suites of a run, by suite and then by step. Of a fork those before the step at
    which it begins are left out, where that step was evaluated too.
    """
    begin = max((fork.step for fork in lineage.read(workdir)), default=0)
    results = suite.load_all(workdir)
    at_begin = {result.suite for result in results if result.step == begin}
    return [result for result in results if result.step >= begin or result.suite not in at_begin]
