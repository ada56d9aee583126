"""Alembic runs this file: it migrates the connection that ``database.migrate`` hands over."""

from alembic import context

from people.feedback.tables import METADATA


def migrate() -> None:
    """Runs the migrations that are missing, in the caller's transaction: after a kill there is all
    of them or nothing.
    """
    context.configure(
        connection=context.config.attributes["connection"],
        target_metadata=METADATA,
        transactional_ddl=True,
    )
    context.run_migrations()


# There is a config while alembic runs this file alone; an import does nothing.
if hasattr(context, "config"):
    migrate()
