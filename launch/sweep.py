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

With --run=<i> only run i of the sweep runs, without a table, as a task of a cluster's array does.
With --jobs=0 nothing runs: the table and the figure are made of what has
finished, and the other runs are named.
"""

from __future__ import annotations

import json
import runpy
import shutil
import signal
import subprocess
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

from launch import flags, sweep_figure, sweep_fork, sweep_paired
from launch.step import STEP
from launch.sweep_figure import Panel
from launch.sweep_plan import DONE, SweepRun, plan
from rl_code import read_config, sft
from rl_code.evaluation import suite
from rl_code.evaluation.suite import SuiteResult
from rl_code.files import write_atomically
from rl_code.run_config import RunConfig
from rl_code.workdir import CONFIG_FILE

# The file in a run's folder with its output.
LOG = "log.txt"
# The exit code of a run whose config is wrong, or whose result would repeat itself.
WRONG = 2
# The command that runs one config.
TRAIN = (sys.executable, "-m", "launch.train")

FLAGS = absl_flags.FLAGS
absl_flags.DEFINE_integer(
    "jobs",
    1,
    "Runs at the same time; above 1 each run's output goes to its log.txt. 0 runs nothing.",
    0,
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


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    path, colon, argument = config_flags.get_config_filename(FLAGS["config"]).partition(":")
    module = runpy.run_path(path)
    arguments = [argument] if argument else []
    if STEP.value is not None and not FLAGS.fork:
        raise read_config.ConfigError(
            f"--step={STEP.value} says where a run is forked; name the run by --fork=<workdir>"
        )
    if "get_sweep" not in module:
        raise read_config.ConfigError(f"{path} defines no get_sweep(), which says what to run")
    runs = plan(config, module["get_sweep"](*arguments), Path(workdir))
    panels = sweep_figure.parse(module["get_figure"](*arguments) if "get_figure" in module else ())
    given = flags.overrides()
    command = [*TRAIN, f"--config={path}{colon}{argument}", *given]
    chosen = choose(runs, FLAGS.run, FLAGS.jobs)
    failed: list[SweepRun] = []
    if FLAGS.fork:
        parent = Path(FLAGS.fork)
        command = list(TRAIN)
        given_keys = [flag.partition("config.")[2].partition("=")[0] for flag in given]
        for run in runs:
            sweep_fork.check(parent, run.config, [*run.overrides, *given_keys])
        step = sweep_fork.common_step(parent, STEP.value, [run.workdir for run in runs])
        for run in chosen:
            if not sweep_fork.fork(parent, step, run.workdir, [*given, *run.flags()]):
                failed.append(run)
    try:
        able = [run for run in chosen if run not in failed]
        failed += execute(able, command, FLAGS.jobs, forked=bool(FLAGS.fork))
    finally:
        if FLAGS.run is None:
            base = runs[0].variant if FLAGS.fork else None
            done = [run for run in runs if run.finished()]
            report(done, panels, Path(workdir), FLAGS.figure, base=base)
    if not FLAGS.jobs and (missing := [run.workdir.name for run in runs if not run.finished()]):
        raise SweepError(
            f"{len(missing)} of {len(runs)} runs have not finished: {', '.join(missing)}"
        )
    if failed:
        logs = ", ".join(str(run.workdir) for run in failed)
        raise SweepError(
            f"{len(failed)} of {len(runs)} runs failed: {logs}; the same command tries them again"
        )


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
    runs: Sequence[SweepRun], command: Sequence[str], jobs: int, *, forked: bool = False
) -> list[SweepRun]:
    """Runs ``command`` once for each unfinished run, with the run's overrides.

    At most ``jobs`` run at the same time. Returns the runs that failed.

    forked: the folders of the runs hold their configs, overrides included.

    A first Ctrl-C or SIGTERM is passed on to the runs, so that they end after their step. A second
    one ends them at once.
    """
    waiting = [run for run in runs if not run.finished()]
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished before", flush=True)
    active: dict[subprocess.Popen[bytes], tuple[SweepRun, float]] = {}
    failed: list[SweepRun] = []
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                take_over_warm_start(run, runs)
                own = [f"--config={run.workdir / CONFIG_FILE}"] if forked else run.flags()
                active[start(run, [*command, *own], to_log=jobs > 1)] = run, time.time()
            for process in [process for process in active if process.poll() is not None]:
                run, started = active.pop(process)
                if not record(run, process.returncode, time.time() - started):
                    failed.append(run)
            time.sleep(0.05)
    finally:
        stop(list(active))
        signal.signal(signal.SIGTERM, previous)
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
        if not read_config.diff(other.config, run.config, without=sft.MAY_DIFFER):
            partial = run.workdir / f".{sft.FOLDER}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(source, partial)
            partial.rename(target)
            print(
                f"{run.workdir.name} takes over the warm start of {other.workdir.name}", flush=True
            )


def start(run: SweepRun, command: Sequence[str], to_log: bool) -> subprocess.Popen[bytes]:
    """Starts a run as a process in a group of its own.

    A Ctrl-C in the terminal goes to the sweep's group only; ``stop`` passes it on.
    """
    run.workdir.mkdir(parents=True, exist_ok=True)
    command = [*command, f"--workdir={run.workdir}"]
    print(f"starting {run.workdir.name}", flush=True)
    if not to_log:
        return subprocess.Popen(command, process_group=0)
    with open(run.workdir / LOG, "ab") as log:
        return subprocess.Popen(command, process_group=0, stdout=log, stderr=subprocess.STDOUT)


def record(run: SweepRun, exit_code: int, seconds: float) -> bool:
    """Records that a run has ended, and returns whether it ended without an error."""
    if exit_code == 0:
        done = {"config": read_config.to_dict(run.config), "seconds": seconds}
        write_atomically(run.workdir / DONE, json.dumps(done).encode())
    else:
        log = run.workdir / LOG
        tail = log.read_text(errors="replace").splitlines()[-5:] if log.exists() else []
        words = f"{run.workdir.name} failed with exit code {exit_code}"
        if exit_code == WRONG:
            words += "; to start it again does not help before something is changed"
        print("\n".join([words, *tail]), flush=True)
    return exit_code == 0


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Asks runs to stop after their step, and waits for them.

    Another Ctrl-C while it waits asks them again, which makes them stop at once.
    """
    while any(process.poll() is None for process in processes):
        for process in processes:
            if process.poll() is None:
                process.terminate()
        try:
            for process in processes:
                process.wait()
        except KeyboardInterrupt:
            continue


# --- Comparing ------------------------------------------------------------------------------------


def report(
    runs: Sequence[SweepRun],
    panels: Sequence[Panel],
    workdir: Path,
    figure: str | None = None,
    *,
    base: str | None = None,
) -> None:
    """Prints the table of the finished runs and the numbers of the figure, writes both and the
    figure into the workdir.

    figure: another file that the figure is written to, or None. base: where runs of one seed draw
    common random numbers, the variant from which paired differences are taken.

    Raises ConfigError for a metric that a run did not write.
    """
    if not runs:
        return
    variants: dict[str, list[Path]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run.workdir)
    views: list[Any] = [table(variants)]
    views += (sweep_figure.table(panel, variants) for panel in panels)
    if base in variants:
        found = [(run.variant, run.config.seed, run.workdir) for run in runs]
        views.append(sweep_paired.table(base, found))
    elif base is not None:
        views.append(f"no run of {base} has finished, so there are no paired differences from it")
    with open(workdir / "sweep.txt", "w") as file:
        for console in (flags.console(), rich.console.Console(file=file, width=160)):
            console.print(*views)
    if panels:
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
    flags.run(main, kind=RunConfig, expected=(SweepError,))
