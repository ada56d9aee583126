"""Databases for the tests of feedback: each test runs on SQLite and on PostgreSQL."""

from __future__ import annotations

import itertools

import pytest
import sqlalchemy

from experiments.load import postgres

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def server():
    if reason := postgres.why_not():
        pytest.skip(reason)
    with postgres.server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/people.db"
    server = sqlalchemy.make_url(request.getfixturevalue("server").url)
    name = f"test_{next(_NUMBERS)}"
    engine = sqlalchemy.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return server.set(database=name).render_as_string(hide_password=False)
