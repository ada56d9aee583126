"""A database by its URL: SQLite in a file, or a PostgreSQL server; durable, and migrated.

    sqlite:///runs/a/people.db
    postgresql+psycopg://user:password@host:5432/name

PostgreSQL needs the extra ``postgres`` (requirements/postgres.txt).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import ArgumentError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from rl_code.host.files import make_private

# Milliseconds that a process waits for another one that writes to the same file.
_BUSY_MS = 60_000
# Number of the lock that PostgreSQL's sessions share: writers together, a selection alone.
_LOCK = 0x7265636F
# What SQLite says while another process writes.
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def connect(url: str) -> Engine:
    """An engine whose commits are on the disk when they return, with all tables made. As
    ``make_engine``, and raises sqlalchemy.exc.OperationalError for a database that cannot be
    reached.
    """
    engine = make_engine(url)
    migrate(engine)
    return engine


def make_engine(url: str, *, new: bool = True) -> Engine:
    """An engine whose commits are on the disk when they return. Nothing is written yet.

    new: whether a file may be made a database; else FileNotFoundError is raised where there is no
    file or it has no tables of this project, and ValueError where it is no database. Raises
    ValueError for a URL of another kind of database.
    """
    try:
        parsed = sqlalchemy.make_url(url)
        kind = parsed.get_backend_name()
    except ArgumentError as error:
        raise ValueError(f"database {url!r}: {error}") from error
    if kind == "sqlite":
        return _sqlite(parsed, new)
    if kind == "postgresql":
        # a server that was restarted leaves dead connections behind
        return sqlalchemy.create_engine(parsed, pool_pre_ping=True, pool_size=8)
    raise ValueError(f"database {url!r}: expected sqlite:///FILE or postgresql+psycopg://...")


def explain(url: str, error: Exception) -> str:
    """An error of a database as one line that names the database."""
    cause = getattr(error, "orig", None) or error
    words = " ".join(str(cause).split())
    return words if url in words else f"{url}: {words}"


def _sqlite(url: sqlalchemy.URL, new: bool) -> Engine:
    if url.database in (None, "", ":memory:"):
        raise ValueError(f"database {str(url)!r}: name a file, since events must survive a process")
    if not new:
        _check_tables(url)
    elif not url.database.startswith("file:"):
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        # it holds what people wrote; SQLite gives its log the rights of the file
        make_private(Path(url.database))
        for ending in ("-wal", "-shm", "-journal"):
            if (beside := Path(f"{url.database}{ending}")).exists():
                make_private(beside)
    engine = sqlalchemy.create_engine(url)

    @event.listens_for(engine, "connect")
    def _(connection, record) -> None:
        connection.isolation_level = None  # transactions begin below, not by sqlite3's rules
        connection.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        # what is committed is in the log and synced; what is deleted is overwritten
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("PRAGMA secure_delete=ON")

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        # A transaction that reads and then writes would fail at once if another one wrote between
        # the two, so each takes the lock of writers first, unless it says that it only reads.
        reads = connection.get_execution_options().get("reads", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _check_tables(url: sqlalchemy.URL) -> None:
    """Looks into the file of a database without writing to it. Raises as ``make_engine``."""
    path = Path(url.database or "")
    if not path.exists():
        raise FileNotFoundError(f"database {str(url)!r}: there is no such file")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            found = connection.execute(
                "SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'"
            ).fetchone()
    except sqlite3.DatabaseError as error:
        raise ValueError(f"database {str(url)!r}: {error}") from error
    if found is None:
        raise FileNotFoundError(f"database {str(url)!r}: the file has no tables of this project")


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that sees one state of the database and writes nothing."""
    options = {"reads": True}
    if engine.dialect.name == "postgresql":
        options["isolation_level"] = "REPEATABLE READ"
    with engine.connect().execution_options(**options) as connection:
        yield connection


@contextmanager
def writing(engine: Engine, *, alone: bool = False) -> Iterator[Connection]:
    """A transaction that writes. With ``alone`` no other one that was begun by this function is
    open meanwhile; in SQLite none ever is.
    """
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            lock = "pg_advisory_xact_lock" if alone else "pg_advisory_xact_lock_shared"
            connection.execute(text(f"SELECT {lock}({_LOCK})"))
        yield connection


def is_away(error: Exception) -> bool:
    """True if an error says that the database does not answer now, as while it is started again;
    the same call may do later. What it was about to write may have been written.
    """
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, OperationalError):
        return False
    # SQLite calls much else operational, such as a table that is missing
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code is None or code & 0xFF in _LOCKED


def now(connection: Connection) -> float:
    """Unix seconds on the one clock that all processes of a database share."""
    if connection.dialect.name == "postgresql":
        return float(connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())")))
    return time.time()


def migrate(engine: Engine) -> None:
    """Brings the tables to the newest form: all migrations that are missing, or none of them.

    Several processes may do so at once.
    """
    config = _migrations()
    with writing(engine, alone=True) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def is_newest(engine: Engine) -> bool:
    """True if the database has the newest tables, so that ``migrate`` has nothing to do."""
    heads = ScriptDirectory.from_config(_migrations()).get_heads()
    with reading(engine) as connection:
        return set(MigrationContext.configure(connection).get_current_heads()) == set(heads)


def _migrations() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config
