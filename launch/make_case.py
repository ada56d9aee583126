"""Turns a recorded session into a case of the red team: work that must not be paid.

    python -m launch.make_case --sessions=sessions.jsonl --session=1207 --name=tests-deleted
    python -m launch.redteam --only=sessions --cases=cases.jsonl

An alarm names sessions; read one, and if its reward is not deserved make it a case. The red team
then hands its work in again, and fails while it earns more than the files that the agent was given.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from launch import command
from people.realtime.cases import SessionFileError, case_of, read_sessions
from rl_code.redteam.recorded import append_case
from rl_code.tasks.row_files import TaskFileError

FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    try:
        found, wrong = read_sessions(Path(FLAGS.sessions))
        case = case_of(found, FLAGS.session, FLAGS.name, FLAGS.user)
        append_case(Path(FLAGS.out), case)
    except (SessionFileError, TaskFileError, ValueError) as error:
        command.refuse(str(error))
    if wrong:
        print(f"{len(wrong)} lines of {FLAGS.sessions} hold no answer: {wrong[0]}")
    print(f"{FLAGS.name}: {len(case['files'])} files of session {FLAGS.session}, in {FLAGS.out}")


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    flags.DEFINE_string("sessions", None, "File of recorded sessions.", required=True)
    flags.DEFINE_string("session", None, "The session's name.", required=True)
    flags.DEFINE_string("name", None, "What the case is called.", required=True)
    flags.DEFINE_string("user", "", "Whose session, where two have one of that name.")
    flags.DEFINE_string("out", "cases.jsonl", "File that the case is added to.")


if __name__ == "__main__":
    define_flags()
    command.run(main)
