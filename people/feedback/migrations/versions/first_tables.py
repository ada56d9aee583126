"""The first tables: answers, events, training sets, refusals, suspects."""

from alembic import op
from sqlalchemy import Column, Float, ForeignKey, Integer, LargeBinary, String, Text

revision = "feedback_1"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _answers_and_events()
    op.create_table(
        "training_sets",
        Column("cycle", Integer, primary_key=True, autoincrement=False),
        Column("watermark", Float, nullable=False),
        Column("digest", String(64), nullable=False),
        *(
            Column(name, Integer, nullable=False)
            for name in ("answers", "sessions", "outside", "deleted", "expired")
        ),
    )
    op.create_table(
        "uses",
        Column("answer", String(200), ForeignKey("answers.id"), primary_key=True),
        Column("cycle", Integer, ForeignKey("training_sets.cycle"), nullable=False),
        Column("place", Integer, nullable=False),
    )
    op.create_index("uses_of_cycle", "uses", ["cycle"])
    op.create_table(
        "refusals",
        Column("user", String(64), primary_key=True),
        Column("events", Integer, nullable=False),
        Column("last_at", Float, nullable=False),
    )
    op.create_table(
        "suspects",
        Column("cycle", Integer, primary_key=True, autoincrement=False),
        Column("user", String(64), primary_key=True),
        Column("reason", String(32), primary_key=True),
        Column("weight", Float, nullable=False),
        Column("text", String, nullable=False),
    )
    op.create_index("suspects_of_user", "suspects", ["user"])


def _answers_and_events() -> None:
    names = ("session", "model", "adapter", "arm")
    op.create_table(
        "answers",
        Column("id", String(200), primary_key=True),
        Column("user", String(64), nullable=False),
        *(Column(name, String(200), nullable=False) for name in names),
        *(Column(name, String(32), nullable=False) for name in ("kind", "finish_reason")),
        *(
            Column(name, Integer, nullable=False)
            for name in ("version", "context", "parent", "kept")
        ),
        *(
            Column(name, Float, nullable=False)
            for name in ("asked_at", "answered_at", "first_token_s", "recorded_at")
        ),
        *(
            Column(name, LargeBinary, nullable=False)
            for name in ("given", "tokens", "logprobs", "versions")
        ),
        Column("extra", Text, nullable=False),
    )
    op.create_index("answers_of_user", "answers", ["user"])
    op.create_index("answers_by_time", "answers", ["recorded_at"])
    op.create_table(
        "events",
        Column("user", String(64), primary_key=True),
        Column("key", String(200), primary_key=True),
        Column("answer", String(200), nullable=False),
        Column("kind", String(32), nullable=False),
        Column("at", Float, nullable=False),
        Column("value", Float),
        Column("horizon_s", Float),
        Column("extra", Text, nullable=False),
        Column("received_at", Float, nullable=False),
    )
    op.create_index("events_of_answer", "events", ["answer"])
    op.create_index("events_by_time", "events", ["received_at"])
