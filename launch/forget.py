"""Removes all that is kept of a person, whose API key may be withdrawn already.

    python -m launch.forget --workdir=runs/realtime --key_file=key.txt
    python -m launch.forget --database=postgresql+psycopg://... --user=3f0c...
    python -m launch.forget --record=answers.jsonl --secret=runs/own/secret --key_file=key.txt

--key_file holds the API key, since a command line can be read by others; --user is the person as
records name them. --workdir is that of launch.realtime, with people.db and the secret; --database
and --secret name others. --record is the file of launch.serve, which must not be running. It prints
the cycles that were trained on answers of this person: their versions hold what they learned. Files
with keys of documents (``serving.documents_mb``) do not say whose they are, so all of them are
removed: those of --workdir, or of the folder --documents. A running server also keeps chats in its
memory, which `DELETE /v1/users/USER` forgets (docs/feedback.md).
"""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path

from absl import flags
from sqlalchemy.exc import DBAPIError

from launch import command
from people.feedback import database
from people.feedback.identity import load_secret, user_key
from people.feedback.store import FeedbackStore
from people.realtime.ledger import forget_sessions
from people.serving import begun
from people.serving.begun import BEGUN
from rl_code.host.files import write_atomically
from rl_code.run.workdir import DOCUMENTS

FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    if not (FLAGS.workdir or FLAGS.database or FLAGS.record or FLAGS.documents):
        command.refuse(
            "give --workdir, --database, --record or --documents: where the person is to be removed"
        )
    user = user_of(FLAGS.user, FLAGS.key_file, FLAGS.secret, FLAGS.workdir)
    url = FLAGS.database or (f"sqlite:///{FLAGS.workdir}/people.db" if FLAGS.workdir else "")
    if url:
        forget_in_database(url, user)
    folder = FLAGS.documents or (f"{FLAGS.workdir}/{DOCUMENTS}" if FLAGS.workdir else "")
    if folder:
        print(f"{forget_documents(Path(folder))} files of documents are removed from {folder}")
    if FLAGS.record:
        count = forget_in_record(Path(FLAGS.record), user)
        print(f"user {user}: {count} answers are removed from {FLAGS.record}")
    if count := forget_begun(user):
        print(f"{count} answers are removed that a killed server was sampling")


def user_of(user: str, key_file: str | None, secret: str | None, workdir: str | None) -> str:
    """The person as records name them."""
    if bool(user) == bool(key_file):
        command.refuse("give either --user or --key_file")
    if user:
        if not re.fullmatch("[0-9a-f]{32}", user):
            command.refuse(f"--user={user}: records name users by 32 hex digits")
        return user
    path = Path(secret or f"{workdir}/secret")
    if not path.is_file():  # load_secret would make one
        command.refuse(f"{path}: no such file; --secret names what users' keys are made with")
    try:
        return user_key(load_secret(path), Path(key_file or "").read_text().strip())
    except (OSError, ValueError) as error:
        command.refuse(f"{error}")


def forget_in_database(url: str, user: str) -> None:
    """Removes a user from a database, and prints what that was."""
    try:
        engine = database.make_engine(url, new=False)
        with FeedbackStore(engine, forget_sessions=forget_sessions) as store:
            gone = store.delete_user(user)
    except (OSError, ValueError, DBAPIError) as error:
        command.refuse(database.explain(url, error))
    print(f"user {user}: {gone.answers} answers and {gone.events} events are removed")
    if gone.cycles:
        numbers = ", ".join(map(str, gone.cycles))
        print(f"cycles {numbers} trained on them: their versions still hold what they learned")


def forget_in_record(path: Path, user: str) -> int:
    """Removes a user's lines from a file of answers; how many these were."""
    try:
        with path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lines = file.readlines()
            kept = [line for number, line in enumerate(lines, 1) if _user(line, number) != user]
            if len(kept) < len(lines):
                write_atomically(path, "".join(kept).encode(), private=True)
    except BlockingIOError:
        command.refuse(f"{path}: a server writes to it; end it first")
    except UnicodeDecodeError as error:
        command.refuse(f"{path} is no file of answers: {error}")
    except ValueError as error:
        command.refuse(f"{path}, {error}; nothing is removed")
    return len(lines) - len(kept)


def forget_begun(user: str) -> int:
    """Removes what killed servers were sampling for a user, which the next ones would record; how
    many answers these were.
    """
    secret = FLAGS.secret or (f"{FLAGS.workdir}/secret" if FLAGS.workdir else "")
    files = [f"{kept}.begun" for kept in (secret, FLAGS.record) if kept]
    files += [f"{FLAGS.workdir}/{BEGUN}"] if FLAGS.workdir else []
    return sum(begun.forget(Path(file), user) for file in files)


def forget_documents(folder: Path) -> int:
    """Removes the files with keys of documents below a folder; how many these were."""
    files = list(folder.glob("*/*.keys"))
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def _user(line: str, number: int) -> str:
    """The person of a recorded answer. Raises ValueError for a line that holds none."""
    try:
        return json.loads(line)["user"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"line {number}: expected an answer as launch.serve records it, a JSON object with "
            f"'user', found {line[:80]!r}"
        ) from error


def define_flags() -> None:
    """Other commands have flags of these names, so they are defined where this one is run."""
    flags.DEFINE_string("workdir", None, "That of launch.realtime.")
    flags.DEFINE_string("database", None, "URL of the database; people.db in the workdir.")
    flags.DEFINE_string("documents", None, "Folder with keys of documents of launch.serve.")
    flags.DEFINE_string("record", None, "File of answers of launch.serve.")
    flags.DEFINE_string("user", "", "The person as records name them: 32 hex digits.")
    flags.DEFINE_string("key_file", None, "File with the person's API key.")
    flags.DEFINE_string("secret", None, "File of what users' keys are made with.")


if __name__ == "__main__":
    define_flags()
    command.run(main)
