"""The trainer with sandboxes that die: ``launch.train``, which knows nothing of it.

The counts of sandboxes go into a file, a line now and then, since the process may be killed at any
time.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

# Python's words for a process that calls ``main``.
PROGRAM = ("-c", "from experiments.endurance import dying; dying.main()")
# A sandbox is killed before one of so many requests: an episode writes its files, and runs tests at
# least once.
_REQUESTS = 3
# Sandboxes after which the counts are written down.
_EVERY = 8


def command(share: float, counts: Path, words: Sequence[str]) -> list[str]:
    """Command of a trainer. share: of the sandboxes that die. words: those of ``launch.train``."""
    return [sys.executable, *PROGRAM, str(share), str(counts), *words]


def main() -> None:
    """Runs ``launch.train`` with the words that follow the share and the file of the counts."""
    share, path, *words = sys.argv[1:]
    sys.argv = ["launch.train", *words]
    if not float(share):
        runpy.run_module("launch.train", run_name="__main__", alter_sys=True)
        return
    from benchmarks.sandbox_kills import Kills, losing

    def note(kills: Kills) -> None:
        if kills.opened % _EVERY == 0:
            line = {"pid": os.getpid(), "opened": kills.opened, "killed": kills.killed}
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")

    with losing(float(share), _REQUESTS, None, note):
        runpy.run_module("launch.train", run_name="__main__", alter_sys=True)


def totals(path: Path) -> tuple[int, int]:
    """(sandboxes that were opened, those of them that were killed) over all processes.

    The newest line of each process counts. Process ids come again, so a line with a smaller count
    than the one before begins another process.
    """
    if not path.exists():
        return 0, 0
    opened = killed = 0
    last: dict[int, dict[str, int]] = {}
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # cut short by a kill
            continue
        before = last.get(line["pid"])
        if before is not None and line["opened"] <= before["opened"]:
            opened, killed = opened + before["opened"], killed + before["killed"]
        last[line["pid"]] = line
    return (
        opened + sum(line["opened"] for line in last.values()),
        killed + sum(line["killed"] for line in last.values()),
    )
