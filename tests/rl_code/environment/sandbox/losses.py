"""Kills sandboxes as a machine does that is short of memory."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import types

from rl_code.environment.sandbox.connection import Connection
from tests.rl_code.environment.sandbox.processes import session_pid


@contextlib.contextmanager
def losing(monkeypatch, chance: float, seed: int):
    """While it is open, sandboxes are killed by chance, each before one of its requests at most."""
    rng = random.Random(seed)
    send = Connection.send
    killed: list[Connection] = []

    def send_or_lose(connection, request, *args, **options):
        # nothing is left to kill in one that was killed before its last request
        if connection not in killed and rng.random() < chance:
            killed.append(connection)
            kill(connection)
        return send(connection, request, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "send", send_or_lose)
        yield killed


def lose_runs(monkeypatch, text: str) -> list[Connection]:
    """Has a sandbox killed during each command with a text, as by code that uses up what the
    session itself needs; those that were.
    """
    send, lost = Connection.send, []

    def lose(connection, request, *args, **options):
        answer = send(connection, request, *args, **options)
        if request["op"] == "run" and text in request["argv"][-1]:
            lost.append(connection)
            kill(connection)
        return answer

    monkeypatch.setattr(Connection, "send", lose)
    return lost


def kill(connection: Connection) -> None:
    """Kills a session, as soon as it has been forked."""
    sandbox = types.SimpleNamespace(_connection=connection)
    while True:
        with contextlib.suppress(IndexError):
            os.kill(session_pid(sandbox), signal.SIGKILL)
            return
        time.sleep(0.01)
