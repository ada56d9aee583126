"""The cost of the durable record when it is large: --record_actors actors deliver --record_groups
groups a step through the store of training, on storage with --delay_ms for each operation.

Store, claims and the actor's loop are those of training. Nothing is sampled or trained: an actor's
scheduler finishes a group of random tokens in each turn. The actors are threads of a few processes,
since a process for each would need more memory than a small machine has. The delay is that of
``launch.faults --storage_ms``, without its rare stalls of a hundred times as much.

Every operation is counted by kind. An operation is what a file server would be asked for; entries
are the names that listings returned. --history steps lie in shards already when the counting
begins: what grows with them costs more in a long run.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import rich.console
import rich.table
from absl import flags

from benchmarks.counted_storage import REQUESTS
from benchmarks.record_roles import Settings
from benchmarks.results import hardware, save, scratch

ROOT = Path(__file__).resolve().parents[1]

flags.DEFINE_integer("record_actors", 100, "Actors, of record.", lower_bound=1)
flags.DEFINE_integer("actor_processes", 2, "Processes whose threads they are.", lower_bound=1)
flags.DEFINE_integer("record_groups", 10_000, "Groups of a step, of record.", lower_bound=1)
flags.DEFINE_integer("history", 100, "Steps that are in shards already, of record.", 0)
flags.DEFINE_integer("group_tokens", 64, "Tokens of each of a group's two trajectories.", 2)
flags.DEFINE_float("delay_ms", 1.0, "Mean delay of an operation, of record.", 0.0)
flags.DEFINE_float("sample_s", 0.0, "Seconds that an actor takes for a group, of record.", 0.0)


def main() -> None:
    console = rich.console.Console(width=100)
    with scratch("record_") as folder:
        report = measure(folder)
    console.print(table(report))
    save(report)


def measure(folder: Path) -> dict:
    """Counts of all processes together, and seconds of each step."""
    options = flags.FLAGS
    names = [f"actor-{i}" for i in range(options.record_actors)]
    settings = Settings(
        role="learner",
        folder=str(folder / "store"),
        history=options.history,
        steps=options.steps,
        groups=options.record_groups,
        tokens=options.group_tokens,
        actors=tuple(names),
        sample_s=options.sample_s,
    )
    learner = start(settings, folder)
    children = [learner]
    try:
        while not (folder / "ready").exists():
            if learner.poll() is not None:
                raise SystemExit(f"the learner ended with exit code {learner.returncode}")
            time.sleep(0.1)
        count = options.actor_processes
        for own in (names[at::count] for at in range(count)):
            role = dataclasses.replace(settings, role="actors", actors=tuple(own))
            children.append(start(role, folder))
        found = [finish(child) for child in children]
    finally:
        for child in children:
            child.kill()
    counts: collections.Counter[str] = collections.Counter()
    for one in found:
        longest = max(counts["longest"], one["counts"].get("longest", 0))
        counts.update(one["counts"])
        counts["longest"] = longest
    return dict(
        hardware=hardware(),
        settings=dataclasses.asdict(settings) | {"storage_ms": options.delay_ms},
        counts=counts,
        learner=found[0]["counts"],
        seconds=found[0]["seconds"],
        files=found[0]["files"],
        bytes=found[0]["bytes"],
    )


def start(settings: Settings, folder: Path) -> subprocess.Popen:
    """A process with slow storage."""
    path = [str(ROOT / "cluster" / "slow_storage"), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"JAX_PLATFORMS": "cpu"}
    if flags.FLAGS.delay_ms:
        variables |= {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "SLOW_STORAGE": settings.folder,
            "SLOW_STORAGE_MS": str(flags.FLAGS.delay_ms),
            "SLOW_STORAGE_STALLS": "0",
        }
    words = json.dumps(dataclasses.asdict(settings))
    command = [sys.executable, "-m", "benchmarks.record_roles", words]
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen) -> dict:
    """The findings of a process."""
    output, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"a process of the benchmark ended with exit code {child.returncode}")
    return json.loads(output.splitlines()[-1])


def table(report: dict) -> rich.table.Table:
    """One row for each kind of operation."""
    settings = report["settings"]
    steps, groups = settings["steps"], settings["groups"]
    counts = report["counts"]
    found = rich.table.Table(
        title=f"{len(settings['actors'])} actors, {groups} groups a step, "
        f"{settings['storage_ms']:g} ms an operation, {settings['history']} steps before"
    )
    for name in ("", "a step", "a group"):
        found.add_column(name, justify="left" if not name else "right")

    def row(name: str, total: float) -> None:
        found.add_row(name, f"{total / steps:,.0f}", f"{total / steps / groups:,.2f}")

    row("files in the step's folder", sum(report["files"]))
    row("bytes in them", sum(report["bytes"]))
    row("bytes read", counts["bytes read"])
    row("bytes written", counts["bytes written"])
    row("operations", sum(counts[kind] for kind in REQUESTS))
    for kind in REQUESTS:
        row(f"  {kind}", counts[kind])
    row("operations of the learner alone", sum(report["learner"].get(k, 0) for k in REQUESTS))
    row("entries listed", counts["entries"])
    found.add_row("longest listing", f"{counts['longest']:,}", "")
    found.add_row("seconds, median", f"{statistics.median(report['seconds']):.1f}", "")
    return found
