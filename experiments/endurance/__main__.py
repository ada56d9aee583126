"""Runs a config for thousands of updates under random kills, dying sandboxes and a full disk.

    nice -n 10 python -m experiments.endurance --config=configs/ten_thousand.py \\
        --workdir=runs/ten_thousand --kills=200 --sandbox_deaths=0.05 --full_disks=1

Kills are SIGKILLs of the trainer with all that it started, at random updates, also while it is just
starting. Two stretches of --quiet updates have none: in these the growth of its memory is measured.
A share of the sandboxes is killed all the time. The full disk is a small file system at the place
of the workdir, which the trainer fills until it ends; then it goes on where there is room.

Ctrl-C or SIGTERM stops the trainer after its step; the same command goes on, with the same plan.
When training has ended, the record is audited: every group was used exactly once, no step is
missing, every fault has come, and the memory grows by less than --memory_mb in 1,000 updates.
report.json has all numbers and score.png the held-out score over the checkpoints, with the faults.
--report makes both of what is there, and runs nothing.
"""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from cluster.fault_stages import environment
from experiments.endurance import dying, report, small_disk
from experiments.endurance import plan as plan_lib
from experiments.endurance.play import EnduranceError, Player
from launch import flags
from rl_code.config import read_config
from rl_code.host.files import lock, write_atomically
from rl_code.run.config import RunConfig

FLAGS = absl_flags.FLAGS
COUNTS_FILE = "sandboxes.jsonl"


def main(config: ml_collections.ConfigDict, workdir: str | None) -> None:
    run_config = read_config.build(RunConfig, config)
    folder = Path(workdir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    steps = run_config.train.steps
    plan = plan_lib.load(folder)
    if FLAGS.report:
        if plan is None:
            raise read_config.ConfigError(f"--report: {folder} has no plan of faults yet")
    else:
        plan = _plan(plan, folder, steps)
        _play(plan, folder)
    found = report.measure(folder, run_config, plan, dying.totals(folder / COUNTS_FILE))
    write_atomically(folder / "report.json", json.dumps(found, indent=1).encode())
    flags.console().print(*report.tables(found))
    report.draw(found, plan, folder / "score.png")
    problems = report.problems(found, plan, FLAGS.memory_mb)
    if problems:
        raise EnduranceError("; ".join(problems))
    print("every check passed")


def _plan(known: plan_lib.Plan | None, folder: Path, steps: int) -> plan_lib.Plan:
    """The plan of the folder, made where there is none."""
    if known is None:
        seed = random.randrange(1 << 32) if FLAGS.strike_seed is None else FLAGS.strike_seed
        quiet = round(0.15 * steps) if FLAGS.quiet is None else FLAGS.quiet
        counts = FLAGS.kills, FLAGS.full_disks
        known = plan_lib.make(steps, *counts, quiet, FLAGS.delay_s, seed)
    plan_lib.check(known, steps, FLAGS.kills, FLAGS.full_disks)
    if FLAGS.full_disks:
        small_disk.namespace()  # refused before hours of training
    known.save(folder)
    return known


def _play(plan: plan_lib.Plan, folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        lock(folder / "lock")
    except OSError as error:
        raise EnduranceError(f"another process plays in {folder}: {error}") from error
    small_disk.mend(folder / "run")
    path = Path(config_flags.get_config_filename(FLAGS["config"])).resolve()
    words = [f"--config={path}", *flags.overrides(), f"--workdir={folder / 'run'}"]
    command = dying.command(FLAGS.sandbox_deaths, folder / COUNTS_FILE, words)
    _say(f"--strike_seed={plan.seed}, {plan.lives} lives so far")
    Player(folder, plan, command, environment(folder), FLAGS.room_kib, _say).play()


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    whole, number = absl_flags.DEFINE_integer, absl_flags.DEFINE_float
    whole("kills", 200, "Kills of the trainer.", 0)
    whole("full_disks", 1, "How often the disk is full.", 0)
    number("sandbox_deaths", 0.05, "Share of the sandboxes that are killed.", 0.0, 1.0)
    whole("quiet", None, "Updates of a stretch without kills; 15 % of the run by default.", 0)
    number("delay_s", 5.0, "Most seconds from the update after which a fault is due.", 0.0)
    whole("room_kib", 4096, "KiB that the full disk has left at first.", 64)
    number("memory_mb", 1.0, "Growth of memory in 1,000 updates that is allowed, in MB.", 0.0)
    whole("strike_seed", None, "Of the faults' moments; random by default.")
    absl_flags.DEFINE_bool("report", False, "Run nothing; audit what is there.")


if __name__ == "__main__":
    define_flags()
    flags.run(main, kind=RunConfig, expected=(EnduranceError, small_disk.SmallDiskError))
