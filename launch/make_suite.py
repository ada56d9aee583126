"""Makes a suite of recorded sessions: tasks that people brought, for the gate.

    python -m launch.make_suite --sessions=sessions.jsonl --out=suites/people.jsonl

A config then has dict(name="people", tasks=dict(name="records", path="suites/people.jsonl",
columns=...)) among its suites; what is printed has the columns. Sessions whose task has no tests
or cannot be read are left out and counted (``realtime.cases``). A suite is drawn once and kept:
candidates are compared on the same tasks.
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from launch import command
from people.realtime.cases import SessionFileError, read_sessions, suite_rows
from rl_code.host.files import write_atomically
from rl_code.tasks import records
from rl_code.tasks.row_files import TaskFileError

FLAGS = flags.FLAGS
_SHOWN = 5


def main(argv: list[str]) -> None:
    out = Path(FLAGS.out)
    if out.exists():
        command.refuse(f"--out={out} exists; a suite stays as it is, name another file")
    try:
        sessions, wrong = read_sessions(Path(FLAGS.sessions))
        found = suite_rows(
            sessions,
            per_user=FLAGS.per_user,
            count=FLAGS.count,
            seed=FLAGS.seed,
        )
    except (SessionFileError, ValueError) as error:
        command.refuse(str(error))
    if not found.rows:
        command.refuse(f"{FLAGS.sessions}: no session has a task that can be graded")
    # the columns that every row has; a row without an optional one could not be read
    columns = [name for name in records.COLUMNS if all(name in row for row in found.rows)]
    lines = [json.dumps({name: row[name] for name in columns}) + "\n" for row in found.rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(lines).encode(), private=True)
    if "fail_to_pass" not in columns:
        try:
            records.load(str(out), {name: name for name in columns})
        except TaskFileError as error:
            out.unlink()
            command.refuse(str(error))
    wrong += found.malformed
    for text in wrong[:_SHOWN]:
        print(f"left out: {text}")
    if len(wrong) > _SHOWN:
        print(f"left out: {len(wrong) - _SHOWN} more that cannot be read")
    print(
        f"{len(found.rows)} tasks in {out}; left out: {found.ungraded} sessions without tests, "
        f"{found.repeated} of a task that is there, {found.crowded} of users who have "
        f"{FLAGS.per_user}"
    )
    print(f"columns = dict({', '.join(f'{name}={name!r}' for name in columns)})")


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    flags.DEFINE_string("sessions", None, "File of recorded sessions.", required=True)
    flags.DEFINE_string("out", None, "File for the suite, which must not exist.", required=True)
    flags.DEFINE_integer("per_user", 5, "Tasks of one user at most.", 1)
    flags.DEFINE_integer("count", 0, "Tasks at most, drawn at random; 0 for all.", 0)
    flags.DEFINE_integer("seed", 0, "Of that draw.")


if __name__ == "__main__":
    define_flags()
    command.run(main)
