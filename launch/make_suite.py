"""Makes a suite of recorded sessions: tasks that people brought, for the gate.

    python -m launch.make_suite --sessions=sessions.jsonl --out=suites/people.jsonl
    python -m launch.make_suite --sessions=sessions.jsonl --out=suites/people.jsonl \\
        --workdir=runs/realtime

The first is of tasks of agents; those whose task has no tests or cannot be read are left out and
counted (``realtime.cases``). The second is of suggestions that people kept, read by the tokenizer
of the workdir whose model gave them (``realtime.kept``). A config then has dict(name="people",
tasks=...) among its suites, with the tasks that are printed. A suite is drawn once and kept:
candidates are compared on the same tasks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from absl import flags

from launch import command
from people.realtime.cases import SuiteRows, read_answers, sessions, suite_rows
from people.realtime.recorded import Joined
from rl_code.host.files import write_atomically
from rl_code.tasks import holes, records
from rl_code.tasks.row_files import TaskFileError

FLAGS = flags.FLAGS
_SHOWN = 5


def main(argv: list[str]) -> None:
    out = Path(FLAGS.out)
    if out.exists():
        command.refuse(f"--out={out} exists; a suite stays as it is, name another file")
    drawn = dict(per_user=FLAGS.per_user, count=FLAGS.count, seed=FLAGS.seed)
    of_agents = FLAGS.workdir is None
    try:
        joined, wrong = read_answers(Path(FLAGS.sessions))
        if of_agents:
            found = suite_rows(sessions(joined), **drawn)
        else:
            found = _holes(joined, drawn)
    except (OSError, ValueError) as error:
        command.refuse(str(error))
    if not found.rows:
        command.refuse(_nothing(joined, of_agents))
    known = records.COLUMNS if of_agents else holes.COLUMNS
    # the columns that every row has; a row without an optional one could not be read
    columns = [name for name in known if all(name in row for row in found.rows)]
    lines = [json.dumps({name: row[name] for name in columns}) + "\n" for row in found.rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(lines).encode(), private=True)
    if of_agents and "fail_to_pass" not in columns:
        try:
            records.load(str(out), {name: name for name in columns})
        except TaskFileError as error:
            out.unlink()
            command.refuse(str(error))
    wrong += list(found.malformed)
    for text in wrong[:_SHOWN]:
        print(f"left out: {text}")
    if len(wrong) > _SHOWN:
        print(f"left out: {len(wrong) - _SHOWN} more that cannot be read")
    ungraded = "sessions without tests" if of_agents else "suggestions that nobody kept"
    print(
        f"{len(found.rows)} tasks in {out}; left out: {found.ungraded} {ungraded}, "
        f"{found.repeated} of a task that is there, {found.crowded} of users who have "
        f"{FLAGS.per_user}"
    )
    if of_agents:
        named = ", ".join(f"{name}={name!r}" for name in columns)
        print(f'tasks = dict(name="records", path="{out}", columns=dict({named}))')
    else:
        print(f'tasks = dict(name="holes", path="{out}")')


def _holes(joined: Joined, drawn: Mapping[str, int]) -> SuiteRows:
    """Rows of suggestions. Raises ValueError, and OSError for a file that cannot be read."""
    from people.realtime import kept  # loads what a model is made of

    return kept.hole_rows(joined, kept.reader(Path(FLAGS.workdir)), **drawn)


def _nothing(joined: Joined, of_agents: bool) -> str:
    """Reason why there is no row."""
    if not of_agents:
        return (
            f"{FLAGS.sessions}: no suggestion was accepted and all alive at its last look, or none "
            f"was for a gap as the model of {FLAGS.workdir} is asked"
        )
    words = f"{FLAGS.sessions}: no session has a task that can be graded"
    if any(answer.kind == "completion" for answer, _ in joined):
        words += "; for its suggestions name --workdir=, the folder of the run that gave them"
    return words


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    flags.DEFINE_string("sessions", None, "File of recorded sessions.", required=True)
    flags.DEFINE_string("out", None, "File for the suite, which must not exist.", required=True)
    flags.DEFINE_string("workdir", None, "Folder of the run that suggested; for agents none.")
    flags.DEFINE_integer("per_user", 5, "Tasks of one user at most.", 1)
    flags.DEFINE_integer("count", 0, "Tasks at most, drawn at random; 0 for all.", 0)
    flags.DEFINE_integer("seed", 0, "Of that draw.")


if __name__ == "__main__":
    define_flags()
    command.run(main)
