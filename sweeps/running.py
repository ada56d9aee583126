"""Runs the unfinished runs of a sweep, several at the same time, and records how each ended."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_code import sft
from rl_code.config import read_config
from rl_code.host.files import write_atomically
from rl_code.host.stop import INTERRUPTED
from rl_code.run.workdir import CONFIG_FILE
from sweeps import DONE
from sweeps.runs import SweepRun
from sweeps.start import FAILED, LOG, Begin, Started, start

# The exit code of a run whose config is wrong, or whose result would repeat itself.
WRONG = 2


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


def execute(
    runs: Sequence[SweepRun],
    command: Sequence[str],
    jobs: int,
    interrupts: Interrupts,
    begin: Begin | None = None,
    *,
    forked: bool = False,
    elsewhere: Sequence[tuple[Path, Any]] = (),
) -> list[Failure]:
    """Runs ``command`` once for each unfinished run, with the run's overrides.

    At most ``jobs`` run at the same time. Returns the runs that failed.

    begin: begins a run; None for here. forked: the folders of the runs hold their configs,
    overrides included. elsewhere: (workdir, config) of finished runs of other sweeps, whose warm
    starts are taken over too.

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
                take_over_warm_start(run, runs, elsewhere)
                kept = f"--config={(run.workdir / CONFIG_FILE).resolve()}"
                own = [kept] if forked else run.flags()
                active[(begin or start)(run, [*command, *own], jobs > 1)] = run
            if interrupts.count > passed_on:
                passed_on = interrupts.count
                for process in active:
                    process.terminate()
            for process in [process for process in active if process.poll() is not None]:
                run = active.pop(process)
                code = process.wait()
                # a signal that is passed on late finds a run without its handler
                stopped = code in (INTERRUPTED, -signal.SIGTERM) and interrupts.count
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


def take_over_warm_start(
    run: SweepRun, runs: Sequence[SweepRun], elsewhere: Sequence[tuple[Path, Any]] = ()
) -> None:
    """Copies the warm start of a finished run whose warm start would be the same.

    Does nothing if ``run`` has a warm start already, or a part of one. elsewhere: (workdir, config)
    of finished runs that are none of ``runs``.
    """
    target = run.workdir / sft.FOLDER
    here = ((other.workdir, other.config) for other in runs if other.finished())
    for workdir, config in itertools.chain(here, elsewhere):
        source = workdir / sft.FOLDER
        if target.exists() or not source.exists():
            continue
        if not read_config.diff(config, run.config, without=sft.may_differ(run.config)):
            partial = run.workdir / f".{sft.FOLDER}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(source, partial)
            partial.rename(target)
            print(f"{run.workdir.name} takes over the warm start of {workdir.name}", flush=True)


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
