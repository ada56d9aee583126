"""Makes the runs of a sweep forks of one run at one step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from rl_code.checkpoint import checkpoint
from rl_code.config import read_config
from rl_code.evaluation import suite
from rl_code.evaluation.suite import SuiteResult
from rl_code.recording import kept_config
from rl_code.run import derive, lineage
from rl_code.run.config import RunConfig
from rl_code.run.workdir import CONFIG_FILE

FORK = (sys.executable, "-m", "launch.fork")


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


def common_step(parent: Path, step: int | None, workdirs: Sequence[Path]) -> int:
    """The step at which all runs of a sweep are forked.

    step: the one that was asked for. None for that of the forks which are there already, and if
    there is none for the parent's newest checkpoint. Raises ConfigError where a workdir holds a run
    that is no fork of the parent at this step: the runs would be no pairs.
    """
    there = {}
    for workdir in workdirs:
        if not (workdir / CONFIG_FILE).exists():
            continue
        forks = lineage.read(workdir)
        if not forks or Path(forks[-1].parent).resolve() != parent.resolve():
            raise read_config.ConfigError(
                f"{workdir} holds a run that is no fork of {parent}; name another --workdir"
            )
        there[workdir] = forks[-1].step
    if step is None:
        step = next(iter(there.values()), max(checkpoint.steps(parent), default=0))
    for workdir, begin in there.items():
        if begin != step:
            raise read_config.ConfigError(
                f"{workdir} was forked at step {begin}, not at {step}; give --step={begin}, or "
                "name another --workdir"
            )
    return step


def fork(parent: Path, step: int, workdir: Path, changes: Sequence[str]) -> int:
    """Makes a workdir a fork, unless it is one. Returns 0, or the exit code of the program that
    tried and has said why it could not.

    step: the first step of its own. changes: overrides of the parent's config and further flags, as
    on a command line.
    """
    if (workdir / CONFIG_FILE).exists():
        return 0
    place = [f"--step={step}", f"--workdir={workdir}"]
    command = [*FORK, str(parent), *place, *changes]
    if code := subprocess.run(command).returncode:
        print(f"{workdir.name} could not be forked from {parent}: exit code {code}", flush=True)
    return code


def evaluations(workdir: Path) -> list[SuiteResult]:
    """Results of suites of a run, by suite and then by step. Of a fork those before the step at
    which it begins are left out, where that step was evaluated too.
    """
    begin = max((fork.step for fork in lineage.read(workdir)), default=0)
    results = suite.load_all(workdir)
    at_begin = {result.suite for result in results if result.step == begin}
    return [result for result in results if result.step >= begin or result.suite not in at_begin]
