"""Makes tasks from Python packages: features that were taken out, and bugs. Each is validated.

    python -m launch.make_tasks --out=data/made                     # the packages of our list
    python -m launch.make_tasks --out=data/made --packages=my.txt   # those of a list of your own

A list has lines ``name==version --hash=sha256:…`` of source distributions that ship their tests.
Everything of a package runs in the sandbox. The folder --out then holds ``tasks.jsonl``, which the
source ``made`` reads, and the layers, which the config names as sandbox.layers. A run that was
stopped or killed goes on when the same command is given again.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich.box
import rich.table
from absl import flags

from launch import command
from rl_code.environment.layers import packages
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.errors import SandboxFault, SandboxUnavailable
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.host.files import write_atomically
from rl_code.metrics.progress import Progress
from rl_code.tasks import made
from rl_code.tasks.guards import guards_of
from rl_code.tasks.makers import graded, package
from rl_code.tasks.makers.make import Maker, Settings, Tally
from rl_code.tasks.makers.runs import sandbox_config
from rl_code.types import Task


def main(_: list[str]) -> None:
    values = flags.FLAGS
    out = Path(values.out)
    try:
        text = Path(values.packages).read_text(encoding="utf-8")
        pins = package.read_list(text)
    except (OSError, UnicodeDecodeError, package.PackageError) as error:
        command.refuse(f"--packages={values.packages}: {error}")
    try:
        settings = Settings(values.deletions, values.bugs, values.pairs)
    except ValueError as error:
        command.refuse(str(error))
    try:
        for folder in ("sdists", "progress"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        store = LayerStore(out / "layers")
        runner = packages.build(store, package.RUNNER.read_text(encoding="utf-8"))
        makers = [Maker(pin, out, settings, store, runner) for pin in pins]
        with SandboxPool(sandbox_config(store.folder)) as pool:
            stopped = _run(makers, pool, values.jobs, quiet=values.json)
            rows = [row for maker in makers for row in maker.rows()]
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            if lines:
                write_atomically(out / made.FILE, "".join(lines).encode())
            count = values.graded if lines and not stopped else 0
            tasks = made.load(out) if lines and not stopped else []
            problems = {
                task.id: _told(graded.problem, task, pool) for task in graded.drawn(tasks, count)
            }
            forgeable = [task.id for task in tasks if _told(_problem, task, pool)]
            if values.refuse_forgeable and forgeable:
                kept = [
                    line
                    for row, line in zip(rows, lines, strict=True)
                    if row["id"] not in forgeable
                ]
                write_atomically(out / made.FILE, "".join(kept).encode())
    except (OSError, packages.PackagesError, SandboxUnavailable, SandboxFault) as error:
        command.refuse(f"--out={out}: {error}")
    tallies = [maker.tally for maker in makers]
    _report(tallies, out, problems, forgeable, as_json=values.json)
    if stopped:
        command.refuse("stopped; the same command goes on")


def _problem(task: Task, pool: SandboxPool) -> str:
    """Reason why a task can be forged; "" for one that cannot."""
    return guards_of(task, pool).problem


def _told(look: Callable[[Task, SandboxPool], str], task: Task, pool: SandboxPool) -> str:
    """Verdict on a task; an error of one task leaves the others alone."""
    try:
        return look(task, pool)
    except SandboxFault:
        raise
    except Exception as error:
        return f"it cannot be looked at: {type(error).__name__}: {error}"


def _run(makers: list[Maker], pool: SandboxPool, jobs: int, *, quiet: bool) -> bool:
    """Lets the makers work; whether a signal has stopped them. Raises SandboxFault."""
    stop = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def leave_off(*_: object) -> None:
        stop.set()
        for number in signals:  # the next one does not wait for what is running
            signal.signal(number, before[number])

    for number in signals:
        signal.signal(number, leave_off)
    begin = time.monotonic()
    file = open(os.devnull, "w") if quiet else sys.stderr
    start = sum(maker.tally.made.total() for maker in makers)
    try:
        with (
            concurrent.futures.ThreadPoolExecutor(jobs) as threads,
            Progress("packages", len(makers), file=file, compiles=False) as progress,
        ):
            running = {threads.submit(maker.run, pool, stop.is_set) for maker in makers}
            while running:
                done, running = concurrent.futures.wait(running, 1.0)
                for one in done:
                    one.result()
                total = sum(maker.tally.made.total() for maker in makers)
                minutes = (time.monotonic() - begin) / 60
                progress.update(
                    len(makers) - len(running),
                    tasks=total,
                    per_minute=(total - start) / max(minutes, 1e-9),
                )
    except BaseException:
        stop.set()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return stop.is_set()


def _report(
    tallies: list[Tally],
    out: Path,
    problems: dict[str, str],
    forgeable: list[str],
    *,
    as_json: bool,
) -> None:
    """Prints what came of each package, why candidates are no tasks, what the grader says, and how
    many tasks can be forged.
    """
    counts = [_counts(tally) for tally in tallies]
    total = _total(counts)
    if as_json:
        found = {"packages": counts, "total": total, "graded": problems, "forgeable": forgeable}
        print(json.dumps(found, indent=1))
        return
    table = rich.table.Table(box=rich.box.SIMPLE)
    for name in ("package", *(name for name in _COLUMNS)):
        table.add_column(name, justify="left" if name == "package" else "right", no_wrap=True)
    for row in (*counts, total):
        table.add_row(row["package"], *(f"{row[name]:,.6g}" for name in _COLUMNS))
    console = command.console()
    console.print(table)
    reasons = rich.table.Table("no task because", "candidates", "%", box=rich.box.SIMPLE)
    for reason, count in sorted(total["rejected"].items(), key=lambda item: -item[1]):
        reasons.add_row(reason, f"{count:,}", f"{100 * count / total['tried']:.1f}")
    console.print(reasons)
    for row in counts:
        if row["refused"]:
            console.print(f"no tasks: {row['refused']}", markup=False, highlight=False)
    for task, text in problems.items():
        if text:
            console.print(f"graded otherwise: {task}: {text}", markup=False, highlight=False)
    if problems:
        good = list(problems.values()).count("")
        console.print(f"the grader agrees on {good} of {len(problems)} tasks", highlight=False)
    if total["tasks"]:
        console.print(f"{total['tasks']:,} tasks in {out / made.FILE}", highlight=False)
    if forgeable:
        refused = flags.FLAGS.refuse_forgeable
        done = "were left out" if refused else "--refuse_forgeable leaves them out"
        console.print(
            f"{len(forgeable):,} of them can be forged without a guess (docs/redteam.md); {done}: "
            f"{', '.join(forgeable[:5])}{', ...' if len(forgeable) > 5 else ''}",
            markup=False,
            highlight=False,
        )


_COLUMNS = (
    *("functions", "tests", "tried", "tasks", "deletions", "emptied", "bugs", "pairs"),
    *("CPU s", "seconds", "tasks/min"),
)


def _counts(tally: Tally) -> dict[str, Any]:
    """A row of the table."""
    tasks = tally.made.total()
    return {
        "package": tally.name,
        "functions": tally.functions,
        "tests": tally.tests,
        "tried": tally.tried.total(),
        "tasks": tasks,
        "deletions": tally.made["removed"],
        "emptied": tally.made["emptied"],
        "bugs": tally.made["bug"],
        "pairs": tally.made["bugs"],
        "CPU s": round(tally.cpu_s, 1),
        "seconds": round(tally.seconds, 1),
        "tasks/min": round(60 * tasks / tally.seconds, 1) if tasks else 0,
        "rejected": dict(tally.rejected),
        "tried by kind": dict(tally.tried),
        "refused": tally.refused,
    }


def _total(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """All packages together."""
    total = {name: sum(row[name] for row in counts) for name in _COLUMNS}
    rejected = collections.Counter()
    for row in counts:
        rejected.update(row["rejected"])
    seconds = total["seconds"]
    # of one package at a time
    total["tasks/min"] = round(60 * total["tasks"] / seconds, 1) if seconds else 0
    return {"package": "all", **total, "rejected": dict(rejected)}


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "The folder that tasks and layers go to.", required=True)
    flags.DEFINE_string("packages", str(package.LIST), "The list of packages.")
    flags.DEFINE_integer("deletions", Settings.deletions, "Deletions of each package, at most.")
    flags.DEFINE_integer("bugs", Settings.bugs, "Bugs of each package, at most.")
    flags.DEFINE_integer("pairs", Settings.pairs, "Pairs of bugs of each package, at most.")
    flags.DEFINE_integer("jobs", 2, "Packages that are worked on at a time.", lower_bound=1)
    flags.DEFINE_integer(
        "graded",
        0,
        "Tasks, drawn at random, that the grader of training judges, too.",
        lower_bound=0,
    )
    flags.DEFINE_bool(
        "refuse_forgeable",
        True,
        "Leaves out tasks whose results can be forged without a guess (docs/redteam.md).",
    )
    flags.DEFINE_bool("json", False, "Prints the counts as JSON instead of tables.")
    command.run(main)
