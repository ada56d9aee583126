"""Runs jobs one after another within a fixed time; whatever ends it costs the last job only.

Each job is a process of its own, with a share of the time that is left. What a job leaves of its
share goes to the later ones. A job appends a line of JSON to the file of results as soon as it
knows something, and its last line, which the runner writes, says how it ended. A job that is cut
off keeps the lines that it has written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = "results.jsonl"
# A job that is cut off may use so much time to end, seconds.
GRACE_S = 5.0
_POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class Job:
    """A process that writes lines."""

    name: str
    # Its share of the time, in proportion to those of the jobs that are still to come; at least
    # ``least_s`` seconds, with less than which it is not begun.
    weight: float
    command: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    least_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines of a job. Each is written at once and whole, whoever else writes to the file."""

    path: Path
    job: str

    def __call__(self, **fields: Any) -> None:
        """Appends a line with these fields, of JSON's types."""
        text = json.dumps({"job": self.job, **fields}) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; without a last one that was cut off while it was written."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def run_all(
    jobs: Sequence[Job],
    folder: Path,
    seconds: float,
    *,
    told: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """Runs the jobs and returns all lines. Where the caller is interrupted, the job that runs is
    ended too.

    folder: has the file of results, and for each job the file <name>.log with its output. seconds:
    for all jobs together. told: takes what to show while they run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS
    end = clock() + seconds
    for at, job in enumerate(jobs):
        left = end - clock() - GRACE_S
        share = max(job.least_s, left * job.weight / sum(later.weight for later in jobs[at:]))
        line = Lines(path, job.name)
        if left <= 0 or left < job.least_s:
            line(ended="no time", seconds=0.0, why=f"{max(left, 0):.0f} s are left")
            told(f"{job.name}: no time is left for it")
            continue
        told(f"{job.name}: up to {share:.0f} s")
        begin = clock()
        ended, why = _run(job, folder, begin + share, told, clock)
        line(ended=ended, seconds=round(clock() - begin, 1), **({"why": why} if why else {}))
        told(f"{job.name}: {ended} after {clock() - begin:.0f} s{': ' + why if why else ''}")
    return read(path)


def _run(
    job: Job, folder: Path, end: float, told: Callable[[str], None], clock: Callable[[], float]
) -> tuple[str, str]:
    """(how the job ended, and why where it is not "done")."""
    log = folder / f"{job.name}.log"
    known = len(read(folder / RESULTS))
    with log.open("wb") as output:
        child = subprocess.Popen(
            job.command,
            env=os.environ | job.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while True:
                late = clock() >= end
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0 if late else _POLL_S)
                for found in (lines := read(folder / RESULTS))[known:]:
                    told(f"  {words(found)}")
                known = len(lines)
                if child.returncode is not None or late:
                    break
        finally:
            _end(child)
    if late and child.returncode != 0:
        return "cut off", "its time was over"
    if child.returncode:
        text = log.read_text(errors="replace").strip()
        last = text.splitlines()[-1] if text else "no message"
        return "failed", f"exit code {child.returncode}: {last[:300]}"
    return "done", ""


def _end(child: subprocess.Popen) -> None:
    """Ends a job and what it has started."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
            if number == signal.SIGTERM and child.returncode == 0:
                return


def words(line: Mapping[str, Any]) -> str:
    """The fields of a line on one line."""
    return ", ".join(f"{name} {_word(x)}" for name, x in line.items() if name != "job")


def _word(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)
