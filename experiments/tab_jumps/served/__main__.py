"""Prints what people got from the checkpoints of a cycle of Tab jumps.

    python -m experiments.tab_jumps.served runs/realtime_jumps

The argument is the workdir of a run of configs/realtime_jumps.py with a database of SQLite, also
while it runs. In each cycle the deployed version is compared with the copy that never changes, by
what their people did in the same time.
"""

from __future__ import annotations

from pathlib import Path

from experiments.tab_jumps.served import report
from launch import command


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        command.refuse("name the workdir of a run of configs/realtime_jumps.py, and nothing else")
    folder = Path(argv[1])
    if not (folder / "people.db").is_file():
        command.refuse(
            f"{folder} has no people.db; name the workdir of a run of configs/realtime_jumps.py"
        )
    command.console().print(report.differences(report.read(folder)))


if __name__ == "__main__":
    command.run(main, arguments=True)
