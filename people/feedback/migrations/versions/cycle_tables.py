"""The tables of the cycle (``realtime.tables``): cycles, their versions, edges and alarms."""

from alembic import op
from sqlalchemy import JSON, Column, Float, ForeignKey, Integer, String, inspect, text

revision = "cycle_1"
down_revision = "feedback_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # made without a migration by programs from before this one
    if inspect(op.get_bind()).has_table("cycles"):
        return
    op.create_table(
        "cycles",
        Column("number", Integer, primary_key=True, autoincrement=False),
        Column("state", String(16), nullable=False),
        *(Column(name, Integer, nullable=False) for name in ("edges", "base")),
        Column("candidate", Integer),
        Column("began_at", Float, nullable=False),
        *(Column(name, Float) for name in ("watched_from", "ended_at", "watermark")),
        Column("digest", String(64)),
        *(Column(name, Integer) for name in ("answers", "sessions", "outside")),
        *(Column(name, JSON) for name in ("verdict", "look")),
    )
    op.create_table(
        "cycle_versions",
        Column("version", Integer, primary_key=True, autoincrement=False),
        Column("parent", Integer, ForeignKey("cycle_versions.version")),
        Column("state", String(16), nullable=False),
    )
    deployed = text("state = 'deployed'")
    where = dict(sqlite_where=deployed, postgresql_where=deployed)
    op.create_index("one_deployed", "cycle_versions", ["state"], unique=True, **where)
    op.create_table(
        "cycle_edges",
        Column("cycle", Integer, ForeignKey("cycles.number"), primary_key=True),
        Column("number", Integer, primary_key=True, autoincrement=False),
        *(Column(name, String(16), nullable=False) for name in ("before", "after")),
        Column("at", Float, nullable=False),
        Column("reason", String, nullable=False),
    )
    op.create_table(
        "cycle_alarms",
        Column("cycle", Integer, ForeignKey("cycles.number"), primary_key=True),
        Column("monitor", String(64), primary_key=True),
        Column("at", Float, nullable=False),
        Column("text", String, nullable=False),
        Column("sessions", JSON, nullable=False),
        Column("acknowledged_at", Float),
    )
