"""Runs a config once per set of overrides and compares the runs in one table and one figure.

    python -m launch.sweep --config=configs/ablation.py[:smoke] --workdir=runs/ablation [--jobs=2]

The config file also defines

  get_sweep(arg)   iterable of {dotted key: value}, the overrides of one run each. Runs that differ
                   in nothing but the key ``seed`` are one variant, shown as a mean with the range
                   over seeds. The key ``variant`` names it; without one its overrides do.
  get_figure(arg)  the panels of a figure, as launch/sweep_figure.py says (optional).

Finished runs are skipped and unfinished ones continue, so the same command can be given again at
any time. A run that starts like one that has finished takes over its warm start. The sweep leaves
in the workdir one folder per run, sweep.txt (the table, and the figure's numbers) and sweep.png.

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
import dataclasses
import json
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import rich.console
import rich.markup
import rich.table
from absl import flags as absl_flags
from ml_collections import config_flags

from launch import (
    INTERRUPTED,
    flags,
    sweep_costs,
    sweep_figure,
    sweep_fork,
    sweep_on_ray,
    sweep_paired,
    sweep_plan,
    trusted,
)
from launch.ray_placing import RayError, needs
from launch.step import STEP
from launch.sweep_figure import Panel
from launch.sweep_plan import DONE, SweepRun, plan
from launch.sweep_start import FAILED, LOG, Begin, Started, start
from rl_code import read_config, sft
from rl_code.evaluation import suite
from rl_code.evaluation.suite import SuiteResult
from rl_code.files import write_atomically
from rl_code.run_config import RunConfig
from rl_code.workdir import CONFIG_FILE

# The exit code of a run whose config is wrong, or whose result would repeat itself.
WRONG = 2
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


@dataclasses.dataclass(frozen=True)
class Failure:
    """A run that ended with an error."""

    run: SweepRun
    exit_code: int


class Interrupts:
    """Counts Ctrl-C and SIGTERM instead of being interrupted by them, so that neither the end of
    the runs nor the table of what has finished is cut short. A context manager for the main thread,
    which puts the previous handlers back when it is left.
    """

    def __init__(self):
        self.count = 0

    def __enter__(self) -> Interrupts:
        self._previous = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self.count += 1


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    path, colon, argument = config_flags.get_config_filename(FLAGS["config"]).partition(":")
    if STEP.value is not None and not FLAGS.fork:
        raise read_config.ConfigError(
            f"--step={STEP.value} says where a run is forked; name the run by --fork=<workdir>"
        )
    overrides, figure = sweep_plan.read(path, argument)
    runs = plan(config, overrides, Path(workdir))
    panels = sweep_figure.parse(figure)
    given = flags.overrides()
    command = [*TRAIN, f"--config={Path(path).resolve()}{colon}{argument}", *given]
    chosen = choose(runs, FLAGS.run, FLAGS.jobs)
    failed: list[Failure] = []
    if FLAGS.fork:
        parent = Path(FLAGS.fork)
        command = list(TRAIN)
        given_keys = [flag.partition("config.")[2].partition("=")[0] for flag in given]
        for run in runs:
            sweep_fork.check(parent, run.config, [*run.overrides, *given_keys])
        step = sweep_fork.common_step(parent, STEP.value, [run.workdir for run in runs])
        for run in chosen:
            if code := sweep_fork.fork(parent, step, run.workdir, [*given, *run.flags()]):
                failed.append(Failure(run, code))
    unable = [failure.run for failure in failed]
    with contextlib.ExitStack() as stack:
        begin = None
        if FLAGS.ray and FLAGS.jobs:
            needed = needs("run_needs", FLAGS.run_needs)
            begin = stack.enter_context(sweep_on_ray.cluster(FLAGS.ray, needed))
        interrupts = stack.enter_context(Interrupts())
        jobs = len(runs) if FLAGS.ray and not FLAGS["jobs"].present else FLAGS.jobs
        try:
            able = [run for run in chosen if run not in unable]
            failed += execute(able, command, jobs, interrupts, begin, forked=bool(FLAGS.fork))
        finally:
            missing = [run for run in runs if not run.finished()]
            if FLAGS.run is None:
                base = runs[0].variant if FLAGS.fork else None
                done = [run for run in runs if run not in missing]
                report(done, panels, Path(workdir), FLAGS.figure, base=base, missing=missing)
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


# --- Running --------------------------------------------------------------------------------------


def execute(
    runs: Sequence[SweepRun],
    command: Sequence[str],
    jobs: int,
    interrupts: Interrupts,
    begin: Begin | None = None,
    *,
    forked: bool = False,
) -> list[Failure]:
    """Runs ``command`` once for each unfinished run, with the run's overrides.

    At most ``jobs`` run at the same time. Returns the runs that failed.

    begin: begins a run; None for here. forked: the folders of the runs hold their configs,
    overrides included.

    A first interrupt is passed on to the runs, so that they end after their step, and a second one,
    which ends them at once. Raises KeyboardInterrupt when all of them have ended.
    """
    waiting = [run for run in runs if not run.finished()]
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished before", flush=True)
    active: dict[Started, SweepRun] = {}
    failed: list[Failure] = []
    passed_on = 0
    try:
        while active or (waiting and not interrupts.count):
            while waiting and len(active) < jobs and not interrupts.count:
                run = waiting.pop(0)
                take_over_warm_start(run, runs)
                kept = f"--config={(run.workdir / CONFIG_FILE).resolve()}"
                own = [kept, *trusted.passed_on()] if forked else run.flags()
                active[(begin or start)(run, [*command, *own], jobs > 1)] = run
            if interrupts.count > passed_on:
                passed_on = interrupts.count
                for process in active:
                    process.terminate()
            for process in [process for process in active if process.poll() is not None]:
                run = active.pop(process)
                code = process.wait()
                stopped = code == INTERRUPTED and interrupts.count
                if not stopped and not record(run, code, process.seconds):
                    failed.append(Failure(run, code))
            time.sleep(0.05)
    finally:
        for process in active:  # only after an error
            process.terminate()
        for process in active:
            process.wait()
    if interrupts.count:
        raise KeyboardInterrupt
    return failed


def take_over_warm_start(run: SweepRun, runs: Sequence[SweepRun]) -> None:
    """Copies the warm start of a finished run whose warm start would be the same.

    Does nothing if ``run`` has a warm start already, or a part of one.
    """
    target = run.workdir / sft.FOLDER
    for other in runs:
        source = other.workdir / sft.FOLDER
        if target.exists() or not source.exists() or not other.finished():
            continue
        if not read_config.diff(other.config, run.config, without=sft.may_differ(run.config)):
            partial = run.workdir / f".{sft.FOLDER}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(source, partial)
            partial.rename(target)
            print(
                f"{run.workdir.name} takes over the warm start of {other.workdir.name}", flush=True
            )


def record(run: SweepRun, exit_code: int, seconds: float) -> bool:
    """Records that a run has ended, and returns whether it ended without an error."""
    if exit_code == 0:
        done = {"config": read_config.to_dict(run.config), "seconds": seconds}
        write_atomically(run.workdir / DONE, json.dumps(done).encode())
    else:
        failure(run, exit_code)
        log = run.workdir / LOG
        tail = log.read_text(errors="replace").splitlines()[-5:] if log.exists() else []
        words = f"{run.workdir.name} failed with exit code {exit_code}"
        if exit_code == WRONG:
            words += "; to start it again does not help before something is changed"
        print("\n".join([words, *tail]), flush=True)
    return exit_code == 0


def failure(run: SweepRun, exit_code: int) -> Failure:
    """Writes down that a run failed, for the table."""
    run.workdir.mkdir(parents=True, exist_ok=True)
    write_atomically(run.workdir / FAILED, json.dumps({"exit_code": exit_code}).encode())
    return Failure(run, exit_code)


# --- Comparing ------------------------------------------------------------------------------------


def report(
    runs: Sequence[SweepRun],
    panels: Sequence[Panel],
    workdir: Path,
    figure: str | None = None,
    *,
    base: str | None = None,
    missing: Sequence[SweepRun] = (),
) -> None:
    """Prints the table of the finished runs and the numbers of the figure, writes both and the
    figure into the workdir.

    figure: another file that the figure is written to, or None. base: where runs of one seed draw
    common random numbers, the variant from which paired differences are taken. missing: the other
    runs of the sweep, each of which has a row that says what became of it.

    Raises ConfigError for a metric that a run did not write.
    """
    variants: dict[str, list[Path]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run.workdir)
    views: list[Any] = [table(variants), sweep_costs.table(variants)] if runs else []
    views += [missing_table(missing)] if missing else []
    if runs:
        views += (sweep_figure.table(panel, variants) for panel in panels)
    if base in variants:
        found = [(run.variant, run.config.seed, run.workdir) for run in runs]
        views.append(sweep_paired.table(base, found))
    elif base is not None and runs:
        views.append(f"no run of {base} has finished, so there are no paired differences from it")
    with open(workdir / "sweep.txt", "w") as file:
        for console in (flags.console(), rich.console.Console(file=file, width=160)):
            console.print(*views)
    if panels and runs:
        sweep_figure.draw(variants, panels, workdir / "sweep.png")
        print(f"Figure: {workdir / 'sweep.png'}")
        if figure:
            Path(figure).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(workdir / "sweep.png", figure)
            print(f"and {figure}")


def table(variants: Mapping[str, Sequence[Path]]) -> rich.table.Table:
    """A table with one row for each variant.

    For every suite it has pass@1 before and after training and the difference, as means over the
    seeds. Before is for a fork where it begins, if that was evaluated. variants: the folders of
    each variant's runs.
    """
    evaluations = {
        workdir: sweep_fork.evaluations(workdir)
        for workdirs in variants.values()
        for workdir in workdirs
    }
    names = list(
        dict.fromkeys(result.suite for results in evaluations.values() for result in results)
    )
    view = rich.table.Table(
        caption=rich.markup.escape(
            "pass@1 in %: mean [lowest, highest] over seeds, or [95 % interval] of one seed"
        ),
        caption_justify="left",
    )
    view.add_column("variant", overflow="fold")
    for column in (
        "seeds",
        *(f"{name} {what}" for name in names for what in ("before", "after", "gain")),
        "minutes",
    ):
        view.add_column(column, justify="right", overflow="fold")
    for variant, workdirs in variants.items():
        cells = []
        for name in names:
            found = [[r for r in evaluations[workdir] if r.suite == name] for workdir in workdirs]
            cells += _suite_cells([results for results in found if len(results) > 1])
        minutes = [json.loads((workdir / DONE).read_text())["seconds"] / 60 for workdir in workdirs]
        view.add_row(
            rich.markup.escape(variant), str(len(workdirs)), *cells, f"{np.mean(minutes):.1f}"
        )
    return view


def missing_table(runs: Sequence[SweepRun]) -> rich.table.Table:
    """A table of runs that have not finished, with what became of each."""
    view = rich.table.Table(title="not finished", title_justify="left")
    view.add_column("variant", overflow="fold")
    view.add_column("seed", justify="right")
    view.add_column("what became of it")
    for run in runs:
        what = "begun" if (run.workdir / CONFIG_FILE).exists() else "not begun"
        if (path := run.workdir / FAILED).exists():
            what = f"failed with exit code {json.loads(path.read_text())['exit_code']}"
        view.add_row(rich.markup.escape(run.variant), str(run.config.seed), what)
    return view


def _suite_cells(results: Sequence[Sequence[SuiteResult]]) -> list[str]:
    """Three cells for one suite: pass@1 before training, after training, and the difference.

    results: for each seed the results of the suite, the earliest first.
    """
    if not results:
        return ["-"] * 3
    if len(results) == 1:
        before = results[0][0].interval(1)
        after = results[0][-1].interval(1)
        return [
            suite.percent(before),
            suite.percent(after),
            f"{100 * (after.mean - before.mean):+.1f}",
        ]
    values = 100 * np.array(
        [[seed[0].interval(1).mean, seed[-1].interval(1).mean] for seed in results]
    )
    columns = (values[:, 0], values[:, 1], values[:, 1] - values[:, 0])
    return [f"{column.mean():.1f} [{column.min():.1f}, {column.max():.1f}]" for column in columns]


if __name__ == "__main__":
    flags.run(main, kind=RunConfig, expected=(SweepError, RayError), lasting=(WrongRuns,))
