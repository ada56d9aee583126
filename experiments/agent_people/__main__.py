"""Prints what people got from the checkpoints of an agent's cycle, and draws it.

    python -m experiments.agent_people runs/realtime_agent [--figure=docs/realtime_agent.png]

The argument is the workdir of a run of configs/realtime_agent.py with a database of SQLite, also
while it runs. Edits that persist, dissatisfied follow-ups and latency of each checkpoint are
compared with those of the copy that never changes, in the same time; beside them the correlation of
the reward with how content people truly were, which they keep to themselves.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags as absl_flags

from experiments.agent_people import report
from launch import command


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        command.refuse("name the workdir of a run of configs/realtime_agent.py, and nothing else")
    folder = Path(argv[1])
    if not (folder / "people.db").is_file():
        command.refuse(
            f"{folder} has no people.db; name the workdir of a run of configs/realtime_agent.py"
        )
    periods = report.read(folder)
    if not periods:
        command.refuse(f"{folder} holds no answer that people got from the deployed version")
    tables = report.senders(folder), report.versions(folder), report.differences(periods)
    command.console().print(*tables)
    report.draw(periods, Path(absl_flags.FLAGS.figure or folder / "agent.png"))


if __name__ == "__main__":
    # another command has a flag of this name, so it is defined where this one is run
    absl_flags.DEFINE_string("figure", "", "File of the figure; agent.png in the folder.")
    command.run(main, arguments=True)
