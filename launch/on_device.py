"""Asks a device all that the benchmarks want to know of one, in the minutes that it is there.

python -m launch.on_device --minutes=9 --out=runs/device
python -m launch.on_device --list                                # the jobs, and what each asks
python -m launch.on_device --only=sampling_8b --minutes=3 --out=runs/device
python -m launch.on_device --rehearse --out=runs/rehearsal       # small sizes, on CPU

The jobs run one after another, the most important first, each in a process of its own with a share
of the time that is left. Every job appends its lines to results.jsonl in --out as soon as it has
them, so that a cut-off costs the last one only; <job>.log there has its output. Compiled programs
are kept in --compiled, which the next device of the same kind can be given. docs/on_device.md has
what was measured, and what comes next.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import rich.markup
import rich.table
from absl import flags

from benchmarks import budgets, device_jobs
from benchmarks.budgets import Job, Lines
from benchmarks.device_jobs import JOBS, DeviceJob
from launch import command
from launch.command import console

FLAGS = flags.FLAGS
_NAMES = tuple(job.name for job in JOBS)


def define_flags() -> None:
    """Flags of this command alone: other modules have some of the same name."""
    flags.DEFINE_float("minutes", 9.0, "For all jobs together.", lower_bound=0.1)
    flags.DEFINE_string("out", None, "Folder for the results.")
    flags.DEFINE_string("compiled", None, "Folder of compiled programs; by default one in --out.")
    flags.DEFINE_bool("list", False, "Print the jobs and run none.")
    flags.DEFINE_list("only", [], f"Of {', '.join(_NAMES)}; all when empty.")
    flags.DEFINE_bool("rehearse", False, "Run every job at a small size on CPU.")
    flags.DEFINE_string("worker", None, "Run this job in this process.")
    # sizes of jobs, beside those that the benches have flags for
    flags.DEFINE_string("device", None, "Of a worker: gpu, tpu or cpu, as attention asks.")
    flags.DEFINE_integer("repeats", 3, "Timed runs.", 1)
    flags.DEFINE_integer("seed", 0, "Of weights and tokens.")
    flags.DEFINE_integer("rows", 8, "Rows of an update, or prompts of a GRPO step.", 1)
    flags.DEFINE_integer("rows_of_group", 4, "Rows that share a prompt, of sampling.", 1)
    flags.DEFINE_list("head_dims", ["64", "128"], "Sizes of heads that are checked.")
    flags.DEFINE_integer("checks", None, "Most checks of attention; all unless given.", 1)
    flags.DEFINE_list("alikes", ["1"], "Consecutive keys that are alike, of attention.")
    flags.DEFINE_integer("seeds", 1, "Seeds of evidence.", 1)
    flags.DEFINE_enum("evidence", "mbpp", ["mbpp", "tiny"], "The run of evidence.")


def main(argv: Sequence[str]) -> int:
    if unknown := [name for name in FLAGS.only if name not in _NAMES]:
        command.refuse(f"--only={unknown[0]} must be of {', '.join(_NAMES)}")
    if FLAGS.list:
        console().print(job_table())
        return 0
    if not FLAGS.out:
        command.refuse("--out=<folder> is missing, for instance --out=runs/device")
    folder = Path(FLAGS.out).absolute()
    if FLAGS.worker:
        return work(FLAGS.worker, folder)
    if (folder / budgets.RESULTS).exists():
        command.refuse(f"--out={FLAGS.out} has results already; name another folder")
    # an exception, so that the job that runs is ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = [job for job in JOBS if job.name in (FLAGS.only or _NAMES)]
    console().print(f"{len(chosen)} jobs in {FLAGS.minutes:g} minutes; results in {folder}")
    try:
        jobs = [process_of(job, folder) for job in chosen]
        budgets.run_all(jobs, folder, 60 * FLAGS.minutes, told=tell)
    finally:
        console().print(result_table(budgets.read(folder / budgets.RESULTS)))
    ends = {x["job"]: x for x in budgets.read(folder / budgets.RESULTS) if "ended" in x}
    return 0 if any(x["ended"] in ("done", "cut off") for x in ends.values()) else 1


def tell(text: str) -> None:
    """Prints a line of the progress at once."""
    print(text, flush=True)


def process_of(job: DeviceJob, folder: Path) -> Job:
    """The process of a job."""
    compiled = Path(FLAGS.compiled).absolute() if FLAGS.compiled else folder / "compiled"
    words = [f"--worker={job.name}", f"--out={folder}", *job.flags(FLAGS.rehearse)]
    if FLAGS.rehearse:
        words.append("--rehearse")
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "PYTHONUNBUFFERED": "1",
    }
    if FLAGS.rehearse:
        environment["JAX_PLATFORMS"] = "cpu"
    elif job.xla:
        # of a GPU: on CPU they would be unknown
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {job.xla}".strip()
    line = (sys.executable, "-m", "launch.on_device", *words)
    return Job(job.name, job.weight, line, environment, job.least_s)


def work(name: str, folder: Path) -> int:
    """Runs a job in this process; what it lacks becomes a line."""
    (job,) = (job for job in JOBS if job.name == name)
    return device_jobs.work(job, Lines(folder / budgets.RESULTS, name), rehearse=FLAGS.rehearse)


def job_table() -> rich.table.Table:
    """The jobs in their order."""
    whole = sum(job.weight for job in JOBS)
    view = rich.table.Table(title="jobs, the most important first", title_justify="left")
    for column in ("job", "share", "asks", "sizes"):
        view.add_column(column, overflow="fold")
    for job in JOBS:
        sizes = " ".join([*job.flags(rehearse=False), job.xla]).strip()
        view.add_row(job.name, f"{100 * job.weight / whole:.0f} %", job.question, sizes)
    return view


def result_table(lines: Sequence[dict]) -> rich.table.Table:
    """Everything that was found, job by job."""
    view = rich.table.Table(title="results", title_justify="left", show_lines=True)
    view.add_column("job", no_wrap=True)
    view.add_column("ended")
    view.add_column("found", overflow="fold")
    for name in dict.fromkeys(line["job"] for line in lines):
        own = [line for line in lines if line["job"] == name]
        ends = [line for line in own if "ended" in line]
        ended = f"{ends[-1]['ended']}, {ends[-1]['seconds']:.0f} s" if ends else "runs"
        found = "\n".join(budgets.words(line) for line in own if line not in ends)
        why = "".join(f"\n{line['why']}" for line in ends if line.get("why"))
        view.add_row(name, ended, rich.markup.escape((found + why).strip()))
    return view


if __name__ == "__main__":
    define_flags()
    command.run(main)
