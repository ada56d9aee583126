"""Number of updates that made each version (``realtime.tables``); null for those before."""

from alembic import op
from sqlalchemy import Column, Integer, inspect

revision = "cycle_2"
down_revision = "cycle_1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # made without a migration by programs from before those of the cycle
    columns = inspect(op.get_bind()).get_columns("cycle_versions")
    if not any(column["name"] == "updates" for column in columns):
        op.add_column("cycle_versions", Column("updates", Integer))
