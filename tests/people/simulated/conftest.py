"""A server that answers as ours does, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from people.simulated.client import Client
from tests.people.simulated.fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def client(server) -> Iterator[Client]:
    client = Client(server.url, "key-1", session="s", sleep=lambda seconds: None)
    yield client
    client.close()
