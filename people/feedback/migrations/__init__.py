"""Migrations of the database, by alembic."""
