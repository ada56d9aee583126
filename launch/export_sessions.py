"""Writes recorded sessions into a file, which launch.make_suite and launch.make_case read.

    python -m launch.export_sessions --workdir=runs/realtime --out=sessions.jsonl
    python -m launch.export_sessions --workdir=runs/realtime --out=alarm.jsonl --session=12ab,97fe

The file has a line {"answer": {...}, "events": [...]} for each answer that was not cut off.
--session takes the names that an alarm gives (/dashboard), --days the newest alone. The file holds
what people did, and a deletion (DELETE /v1/users/me) does not reach it: keep it no longer than it
is needed.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from absl import flags
from sqlalchemy.exc import SQLAlchemyError

from launch import command
from people.feedback import database
from people.feedback.store import FeedbackStore
from people.realtime.cases import line_of
from rl_code.host.files import write_atomically

FLAGS = flags.FLAGS
_DAY_S = 86_400.0
# Answers that are read at once.
_AT_ONCE = 1_000


def main(argv: list[str]) -> None:
    if (FLAGS.workdir is None) == (FLAGS.database is None):
        command.refuse("name one of --workdir, which has people.db, and --database")
    out = Path(FLAGS.out)
    if out.exists():
        command.refuse(f"--out={out} exists; name another file")
    url = FLAGS.database or f"sqlite:///{Path(FLAGS.workdir) / 'people.db'}"
    since = time.time() - FLAGS.days * _DAY_S if FLAGS.days else 0.0
    try:
        lines = _lines(url, FLAGS.session, since)
    except (FileNotFoundError, ValueError, SQLAlchemyError) as error:
        command.refuse(database.explain(url, error))
    if not lines:
        command.refuse(f"{url}: no answer of such a session is recorded")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(lines).encode(), private=True)
    print(f"{len(lines)} answers in {out}")


def _lines(url: str, sessions: list[str], since: float) -> list[str]:
    """The lines of the file. Raises FileNotFoundError for a database that is not there."""
    engine = database.make_engine(url, new=False)
    with FeedbackStore(engine) as store:
        ids = store.of_sessions(sessions or None, since)
        return [
            line_of(answer, events)
            for some in itertools.batched(ids, _AT_ONCE)
            for answer, events in store.joined(some)
        ]


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    flags.DEFINE_string("workdir", None, "Folder of launch.realtime.")
    flags.DEFINE_string("database", None, "URL of the database, where it is not in the workdir.")
    flags.DEFINE_string("out", None, "File for the sessions, which must not exist.", required=True)
    flags.DEFINE_list("session", [], "Names of sessions; all without.")
    flags.DEFINE_float("days", 0.0, "Sessions of so many days; 0 for all.", 0.0)


if __name__ == "__main__":
    define_flags()
    command.run(main)
