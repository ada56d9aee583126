"""Runs a config once per set of overrides and compares the runs in one table and one figure.

    python -m launch.sweep --config=configs/ablation.py[:smoke] --workdir=runs/ablation [--jobs=2]

The config file also defines

  get_sweep(arg)   iterable of {dotted key: value}, the overrides of one run each. Runs that differ
                   in nothing but the key ``seed`` are one variant, shown as a mean with the range
                   over seeds. The key ``variant`` names it; without one its overrides do.
  get_figure(arg)  the panels of a figure, as sweeps/figure.py says (optional).

Finished runs are skipped and unfinished ones continue, so the same command can be given again at
any time. A run that starts like one that has finished takes over its warm start, also from other
sweeps: --warm_starts=runs/ablation,runs/ppo. The sweep leaves in the workdir one folder per run,
sweep.txt (the table, and the figure's numbers) and sweep.png.

    python -m launch.sweep --config=... --workdir=runs/paired --fork=runs/base --step=40

makes every run a fork of one run at one step. Runs of one seed then draw common random numbers and
differ by their overrides alone. A second table has the paired differences from the first variant
beside the unpaired ones, and how many times more runs the unpaired ones would need.

With --ray=<host>:<port> the runs are spread over the nodes of a Ray cluster that mount the workdir,
as many at a time as there is room for; --run_needs=GPU=8 says what each needs. A run whose node is
lost goes on elsewhere from its checkpoint. --ray=auto is the cluster of this machine, and --ray=3
makes one of three nodes here, to try it.

With --run=<i> only run i of the sweep runs, without a table, as a task of a cluster's array does.
With --jobs=0 nothing runs: the table and the figure are made of what has finished, and the other
runs are named. Runs that failed stand in the table too, with their exit codes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from cluster.ray_placing import RayError, needs
from launch import flags, trusted
from launch.step import STEP
from rl_code.config import read_config
from rl_code.run.config import RunConfig
from sweeps import figure as sweep_figure
from sweeps import fork, on_ray, table
from sweeps import runs as sweep_runs
from sweeps.done import finished_in
from sweeps.running import WRONG, Failure, Interrupts, execute
from sweeps.runs import SweepRun

# The command that runs one config.
TRAIN = (sys.executable, "-m", "launch.train")

FLAGS = absl_flags.FLAGS
absl_flags.DEFINE_integer(
    "jobs",
    1,
    "Runs at the same time; above 1 each run's output goes to its log.txt. 0 runs nothing. With "
    "--ray all, unless it is given.",
    0,
)
absl_flags.DEFINE_string("ray", None, "Address of a Ray cluster, or how many nodes to simulate.")
absl_flags.DEFINE_list(
    "run_needs", ["CPU=1"], "With --ray, what a node must have for a run, as in GPU=8 or CPU=32."
)
absl_flags.DEFINE_integer("run", None, "Run this one alone, counted from 0, and make no table.", 0)
absl_flags.DEFINE_list(
    "warm_starts",
    [],
    "Workdirs of other sweeps; warm starts of their finished runs are taken over.",
)
absl_flags.DEFINE_string(
    "figure", None, "Another file that the figure is written to, beside sweep.png of the workdir."
)
absl_flags.DEFINE_string(
    "fork", None, "Workdir of a run; every run of the sweep is a fork of it, from --step on."
)


class SweepError(RuntimeError):
    """Some runs failed; the message names them."""


class WrongRuns(SweepError):
    """All runs that failed would fail again."""


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    path, colon, argument = config_flags.get_config_filename(FLAGS["config"]).partition(":")
    if STEP.value is not None and not FLAGS.fork:
        raise read_config.ConfigError(
            f"--step={STEP.value} says where a run is forked; name the run by --fork=<workdir>"
        )
    if FLAGS.figure and FLAGS.run is not None:
        raise read_config.ConfigError(
            f"--run={FLAGS.run} makes no figure: leave --figure={FLAGS.figure} out, and make it of "
            "all runs with --jobs=0"
        )
    overrides, figure = flags.sweep_of(f"{path}{colon}{argument}")
    runs = sweep_runs.plan(config, overrides, Path(workdir))
    elsewhere = finished_in(FLAGS.warm_starts)
    panels = sweep_figure.parse(figure)
    given = flags.overrides()
    command = [*TRAIN, f"--config={Path(path).resolve()}{colon}{argument}", *given]
    chosen = choose(runs, FLAGS.run, FLAGS.jobs)
    if not (FLAGS.jobs or Path(workdir).is_dir()):
        raise read_config.ConfigError(
            f"--jobs=0 makes the table of what has run, and there is no folder --workdir={workdir}"
        )
    failed: list[Failure] = []
    if FLAGS.fork:
        parent = Path(FLAGS.fork)
        command = [*TRAIN, *trusted.passed_on()]
        given_keys = [flag.partition("config.")[2].partition("=")[0] for flag in given]
        for run in runs:
            fork.check(parent, run.config, [*run.overrides, *given_keys])
        step = fork.common_step(parent, STEP.value, [run.workdir for run in runs])
        for run in chosen:
            changes = [*trusted.passed_on(), *given, *run.flags()]
            if code := fork.fork(parent, step, run.workdir, changes):
                failed.append(Failure(run, code))
    unable = [failure.run for failure in failed]
    with contextlib.ExitStack() as stack:
        begin = None
        if FLAGS.ray and FLAGS.jobs:
            needed = needs("run_needs", FLAGS.run_needs)
            begin = stack.enter_context(on_ray.cluster(FLAGS.ray, needed))
        interrupts = stack.enter_context(Interrupts())
        jobs = len(runs) if FLAGS.ray and not FLAGS["jobs"].present else FLAGS.jobs
        try:
            able = [run for run in chosen if run not in unable]
            elsewhere += [
                (run.workdir, run.config) for run in runs if run not in able and run.finished()
            ]
            failed += execute(
                able,
                command,
                jobs,
                interrupts,
                begin,
                forked=bool(FLAGS.fork),
                elsewhere=elsewhere,
            )
        finally:
            missing = [run for run in runs if not run.finished()]
            if FLAGS.run is None:
                base = runs[0].variant if FLAGS.fork else None
                done = [run for run in runs if run not in missing]
                table.report(
                    done,
                    panels,
                    Path(workdir),
                    flags.console(),
                    FLAGS.figure,
                    base=base,
                    missing=missing,
                )
    if not FLAGS.jobs and missing:
        names = ", ".join(run.workdir.name for run in missing)
        raise SweepError(f"{len(missing)} of {len(runs)} runs have not finished: {names}")
    if failed:
        logs = ", ".join(str(failure.run.workdir) for failure in failed)
        words = f"{len(failed)} of {len(runs)} runs failed: {logs}"
        if all(failure.exit_code == WRONG for failure in failed):
            raise WrongRuns(f"{words}; they would fail again before something is changed")
        raise SweepError(f"{words}; the same command tries them again")


def choose(runs: Sequence[SweepRun], index: int | None, jobs: int) -> list[SweepRun]:
    """The runs of a sweep that this command runs: all, one, or with ``jobs`` = 0 none.

    Raises ConfigError if there is no run of this index.
    """
    if index is None:
        return list(runs) if jobs else []
    if not jobs:
        raise read_config.ConfigError(f"--run={index} and --jobs=0: leave one of the two out")
    if index >= len(runs):
        raise read_config.ConfigError(
            f"--run={index}: the sweep has {len(runs)} runs, counted from 0"
        )
    return [runs[index]]


if __name__ == "__main__":
    flags.run(main, kind=RunConfig, expected=(SweepError, RayError), lasting=(WrongRuns,))
