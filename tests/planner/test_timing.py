"""Tests of how benches time calls."""

import time

import jax.numpy as jnp
import pytest

from planner import timing


def test_short_calls_are_made_several_times_in_a_run_and_long_ones_once(monkeypatch):
    now = [0.0]
    made = []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    # two cores work
    monkeypatch.setattr(time, "process_time", lambda: 2 * now[0])

    def call(seconds):
        made.append(seconds)
        now[0] += seconds
        return jnp.zeros(())

    found = timing.spread(lambda: call(0.001), repeats=3)
    wanted = dict(seconds=0.001, fastest=0.001, slowest=0.001, cpu_seconds=0.002)
    assert found == pytest.approx(wanted)
    # the first compiles, the second finds how many calls a run has
    assert len(made) == pytest.approx(2 + 3 * 20, abs=3)
    made.clear()
    timing.spread(lambda: call(0.011), repeats=3)
    assert len(made) == 2 + 3 * 2
    made.clear()
    assert timing.spread(lambda: call(5.0), repeats=3)["seconds"] == 5.0
    # the second of them is a run
    assert len(made) == 1 + 3
    made.clear()
    timing.spread(lambda: call(5.0), repeats=1)
    assert len(made) == 2 + 1


def test_the_spread_is_that_of_the_runs(monkeypatch):
    now = [0.0]
    took = iter([9.0, 3.0, 1.0, 4.0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: now[0])

    def call():
        now[0] += next(took)
        return jnp.zeros(())

    found = timing.spread(call, repeats=3)
    assert found == dict(seconds=3.0, fastest=1.0, slowest=4.0, cpu_seconds=3.0)
