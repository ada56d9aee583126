"""Simulated programmers in processes of their own, on a server that only looks like one."""

from __future__ import annotations

import time

import pytest

from people.simulated.crowd import Crowd, CrowdConfig, api_key, holes_of

PATIENCE_S = 120.0


def test_the_holes_of_a_session_are_its_own():
    config = CrowdConfig(holes=3)
    holes = list(holes_of(config, "a"))
    assert holes == list(holes_of(config, "a")) != list(holes_of(config, "b"))
    assert len(holes) == 3 and all(one.wanted for one in holes)


def test_a_crowd_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="processes"):
        CrowdConfig(people=1, processes=2)
    with pytest.raises(ValueError, match="recorded"):
        CrowdConfig(habits="angelic")


def test_persons_come_with_their_own_keys_and_end_with_who_started_them(server):
    config = CrowdConfig(people=3, processes=1, at_once=3, holes=2)
    keys = {f"Bearer {api_key(config.seed, person)}" for person in range(3)}
    end = time.monotonic() + PATIENCE_S
    with Crowd(config, server.url) as crowd:
        while time.monotonic() < end:
            crowd.check()
            with server.changed:
                # iterates over a copy, since requests go on
                seen = {headers["Authorization"] for _, _, headers in list(server.requests)}
                if seen == keys and server.events:
                    break
                server.changed.wait(1.0)
        (process,) = crowd._processes
    assert seen == keys and server.events
    assert process.returncode == 0
    sessions = {headers["X-Session"] for _, _, headers in server.requests}
    assert len(sessions) >= 3


def test_processes_that_have_ended_by_themselves_are_noticed(server):
    with Crowd(CrowdConfig(people=1), server.url) as crowd:
        crowd._processes[0].kill()
        crowd._processes[0].wait()
        with pytest.raises(RuntimeError, match="ended with code -9"):
            crowd.check()
