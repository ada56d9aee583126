"""The cycle's tables in the database that the store of feedback has too.

They hold what was decided, and nothing about people but the names of sessions to read. They are
made by the migrations of ``people.feedback`` alone; a test holds that these come to the tables
below.
"""

from __future__ import annotations

import sqlalchemy
from sqlalchemy import (
    JSON,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
)

from people.feedback import database

METADATA = MetaData()

# A row for each cycle. Exactly one is open: its ``ended_at`` is null.
CYCLES = Table(
    "cycles",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=False),
    # One of ``cycle.STATES``, or how it ended: promoted, rolled_back, refused.
    Column("state", String(16), nullable=False),
    # How many edges it has gone along. An edge is taken only from the count that was read, so of
    # two processes one loses.
    Column("edges", Integer, nullable=False),
    # The version that was deployed when it began, and the one that it makes.
    Column("base", Integer, nullable=False),
    Column("candidate", Integer),
    Column("began_at", Float, nullable=False),
    Column("watched_from", Float),
    Column("ended_at", Float),
    # The selection: events up to the watermark, its digest and its size, what was left out.
    Column("watermark", Float),
    Column("digest", String(64)),
    Column("answers", Integer),
    Column("sessions", Integer),
    Column("outside", Integer),
    # What the gate said (``gate.Verdict``) and what the test says so far (``watching.Look``).
    Column("verdict", JSON),
    Column("look", JSON),
)

# A row for each version of the weights that a cycle knows of.
VERSIONS = Table(
    "cycle_versions",
    METADATA,
    Column("version", Integer, primary_key=True, autoincrement=False),
    # The version that it was trained from; null for the first.
    Column("parent", Integer, ForeignKey("cycle_versions.version")),
    # training, candidate, deployed, retired, rolled_back or refused.
    Column("state", String(16), nullable=False),
    # Updates that made it of its parent; null where there are none, or nobody has counted them.
    Column("updates", Integer),
)
# The database itself refuses a second deployed version.
_DEPLOYED = VERSIONS.c.state == "deployed"
Index(
    "one_deployed",
    VERSIONS.c.state,
    unique=True,
    sqlite_where=_DEPLOYED,
    postgresql_where=_DEPLOYED,
)

# Every edge that was taken, and why.
EDGES = Table(
    "cycle_edges",
    METADATA,
    Column("cycle", Integer, ForeignKey("cycles.number"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("before", String(16), nullable=False),
    Column("after", String(16), nullable=False),
    Column("at", Float, nullable=False),
    Column("reason", String, nullable=False),
)

# The alarms of a cycle, one for each monitor. While one is not acknowledged nothing is promoted.
ALARMS = Table(
    "cycle_alarms",
    METADATA,
    Column("cycle", Integer, ForeignKey("cycles.number"), primary_key=True),
    Column("monitor", String(64), primary_key=True),
    Column("at", Float, nullable=False),
    Column("text", String, nullable=False),
    # Names of the sessions to read.
    Column("sessions", JSON, nullable=False),
    Column("acknowledged_at", Float),
)


def connect(url: str) -> sqlalchemy.Engine:
    """An engine for a database by URL, such as ``sqlite:///runs/a/people.db``: that of the store of
    feedback, so that one process needs one engine. What is committed is on the disk.
    """
    return database.make_engine(url)
