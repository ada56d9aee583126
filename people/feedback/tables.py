"""The tables of answers and events, for SQLite and for PostgreSQL.

They are made and changed by the migrations beside this file alone; a test holds that these come to
the tables below.
"""

from __future__ import annotations

import json

import numpy as np
from sqlalchemy import (
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)


class Numbers(TypeDecorator[tuple]):
    """A tuple of numbers as little-endian bytes: exact, and a third of their JSON."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, dtype: str):
        """dtype: numpy's, "<i4" or "<f8"."""
        super().__init__()
        self.dtype = dtype

    def process_bind_param(self, value, dialect):
        return np.asarray(value, self.dtype).tobytes()

    def process_result_value(self, value, dialect):
        return tuple(np.frombuffer(value, self.dtype).tolist())


class Json(TypeDecorator[dict]):
    """Plain JSON values as text in ASCII: PostgreSQL's own type refuses a zero character."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value, dialect):
        return json.dumps(value)

    def process_result_value(self, value, dialect):
        return json.loads(value)


METADATA = MetaData()

# ``records.AnswerRecord``, and when it was recorded: Unix seconds of the database's own clock.
ANSWERS = Table(
    "answers",
    METADATA,
    Column("id", String(200), primary_key=True),
    Column("user", String(64), nullable=False),
    Column("session", String(200), nullable=False),
    Column("model", String(200), nullable=False),
    Column("version", Integer, nullable=False),
    Column("adapter", String(200), nullable=False),
    Column("arm", String(200), nullable=False),
    Column("asked_at", Float, nullable=False),
    Column("answered_at", Float, nullable=False),
    Column("first_token_s", Float, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("finish_reason", String(32), nullable=False),
    Column("context", Integer, nullable=False),
    Column("parent", Integer, nullable=False),
    Column("kept", Integer, nullable=False),
    Column("given", Numbers("<i4"), nullable=False),
    Column("tokens", Numbers("<i4"), nullable=False),
    Column("logprobs", Numbers("<f8"), nullable=False),
    Column("versions", Numbers("<i4"), nullable=False),
    Column("extra", Json, nullable=False),
    Column("recorded_at", Float, nullable=False),
    Index("answers_of_user", "user"),
    Index("answers_by_time", "recorded_at"),
)

# ``records.Event`` and whose it is. It may be there before its answer, so the answer is no foreign
# key. A key belongs to its user: nobody can take the keys of others.
EVENTS = Table(
    "events",
    METADATA,
    Column("user", String(64), primary_key=True),
    Column("key", String(200), primary_key=True),
    Column("answer", String(200), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("at", Float, nullable=False),
    Column("value", Float),
    Column("horizon_s", Float),
    Column("extra", Json, nullable=False),
    Column("received_at", Float, nullable=False),
    Index("events_of_answer", "answer"),
    Index("events_by_time", "received_at"),
)

# What a cycle trained on. The row stays when answers of it are deleted, and counts them.
TRAINING_SETS = Table(
    "training_sets",
    METADATA,
    Column("cycle", Integer, primary_key=True, autoincrement=False),
    Column("watermark", Float, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("answers", Integer, nullable=False),
    Column("sessions", Integer, nullable=False),
    Column("outside", Integer, nullable=False),
    # Answers of it that were deleted since: by their person, or because they were too old.
    Column("deleted", Integer, nullable=False),
    Column("expired", Integer, nullable=False),
)

# The answers of training sets. Its primary key is the answer alone, so the database itself refuses
# an answer in two cycles.
USES = Table(
    "uses",
    METADATA,
    Column("answer", String(200), ForeignKey("answers.id"), primary_key=True),
    Column("cycle", Integer, ForeignKey("training_sets.cycle"), nullable=False),
    # Its place in the selection.
    Column("place", Integer, nullable=False),
    Index("uses_of_cycle", "cycle"),
)

# How many events of a user were refused, since they were for answers of others or of nobody.
REFUSALS = Table(
    "refusals",
    METADATA,
    Column("user", String(64), primary_key=True),
    Column("events", Integer, nullable=False),
    Column("last_at", Float, nullable=False),
)

# Users whose events counted less in a cycle, and why (``poisoning.py``).
SUSPECTS = Table(
    "suspects",
    METADATA,
    Column("cycle", Integer, primary_key=True, autoincrement=False),
    Column("user", String(64), primary_key=True),
    Column("reason", String(32), primary_key=True),
    Column("weight", Float, nullable=False),
    Column("text", String, nullable=False),
    Index("suspects_of_user", "user"),
)
