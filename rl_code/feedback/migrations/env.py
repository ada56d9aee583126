"""Alembic runs this file: it migrates the connection that ``database.migrate`` hands over."""

from alembic import context

from rl_code.feedback.tables import METADATA

# The caller's transaction holds all of it: after a kill there is all of a migration or nothing.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    transactional_ddl=True,
)
context.run_migrations()
