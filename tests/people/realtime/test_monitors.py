"""Monitors find shifts and gamed rewards, stay silent otherwise, and name the sessions to read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from people.realtime.monitors import (
    CHARTS,
    Cusum,
    Ewma,
    Monitor,
    MonitorsConfig,
    alarms,
    correlation,
    standard,
)
from people.realtime.parts import Sessions
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError

RNG = np.random.default_rng(0)


def sessions(count: int, version: int = 0, users: int = 60, **values: np.ndarray) -> Sessions:
    return Sessions(
        np.array([f"v{version}-{i}" for i in range(count)], dtype=object),
        np.array([f"u{version}-{i % users}" for i in range(count)], dtype=object),
        np.full(count, version),
        np.arange(count, dtype=np.float64),
        values,
    )


def watching(*rates: Monitor) -> MonitorsConfig:
    return MonitorsConfig(rates=rates, reward=None)


def test_the_charts_are_their_recursions():
    z = RNG.normal(0.1, 1, 200)
    cusum, ewma = Cusum(slack=0.3, threshold=4.0), Ewma(weight=0.1, limit=3.0)
    s = e = 0.0
    for i in range(200):
        s = max(0.0, s + z[i] - 0.3)
        e = 0.9 * e + 0.1 * z[i]
        assert cusum.path(z)[i] == pytest.approx(s / 4.0)
        assert ewma.path(z)[i] == pytest.approx(e / (3.0 * np.sqrt(0.1 / 1.9)))


@pytest.mark.parametrize("chart", sorted(CHARTS))
@pytest.mark.parametrize("skewed", [False, True])
def test_a_shift_is_found_and_no_shift_is_not(chart, skewed):
    def draw(count, shift):
        values = RNG.normal(shift, 1, count)
        return np.exp(values) if skewed else values

    config = watching(Monitor("length", Named(chart)))
    before = sessions(3_000, length=draw(3_000, 0))
    assert alarms(config, before, sessions(300, 1, length=draw(300, 0))) == []
    (found,) = alarms(config, before, sessions(300, 1, length=draw(300, 1.0)))
    assert found.monitor == "length" and "goes up" in found.text


def test_the_named_sessions_are_those_that_raised_the_alarm():
    values = np.zeros(200)
    values[100:160] = 1.0
    noise = RNG.normal(0, 0.1, 200)
    config = watching(Monitor("invalid_calls"))
    before = sessions(500, invalid_calls=RNG.normal(0, 0.1, 500))
    (found,) = alarms(config, before, sessions(200, 1, invalid_calls=values + noise))
    assert {int(name.split("-")[1]) in range(100, 160) for name in found.sessions} == {True}


def test_a_side_that_is_not_watched_is_no_alarm():
    before = sessions(500, edited=RNG.normal(0, 1, 500))
    lower = sessions(200, 1, edited=RNG.normal(-2, 1, 200))
    assert alarms(watching(Monitor("edited", side="up")), before, lower) == []
    assert len(alarms(watching(Monitor("edited", side="down")), before, lower)) == 1


def test_a_rate_that_never_changed_is_found_when_it_does():
    before = sessions(100, questions=np.zeros(100))
    config = watching(Monitor("questions"))
    assert alarms(config, before, sessions(100, 1, questions=np.zeros(100))) == []
    assert len(alarms(config, before, sessions(100, 1, questions=np.ones(100)))) == 1


def test_standard_values_have_no_mean_and_unit_deviation_whatever_the_tail():
    before, after = np.exp(RNG.normal(0, 2, (2, 20_000)))
    z = standard(before, after)
    assert abs(z.mean()) < 0.05 and z.std() == pytest.approx(1, abs=0.05)


def test_a_reward_that_rises_while_retention_does_not_is_gamed():
    retained = RNG.uniform(0, 1, 600)
    before = sessions(600, reward=retained + RNG.normal(0, 0.2, 600), retained=retained)
    config = MonitorsConfig(reward_scale=0.2)
    honest = sessions(600, 1, reward=before.values["reward"] + 0.5, retained=retained + 0.3)
    assert alarms(config, before, honest) == []
    gamed = sessions(600, 1, reward=before.values["reward"] + 0.5, retained=retained - 0.1)
    (found,) = alarms(config, before, gamed)
    assert found.monitor == "gamed" and "does not" in found.text and len(found.sessions) == 5


def test_a_reward_that_stops_to_agree_with_retention_is_gamed():
    retained = RNG.uniform(0, 1, 600)
    before = sessions(600, reward=retained + RNG.normal(0, 0.1, 600), retained=retained)
    apart = sessions(600, 1, reward=RNG.uniform(0, 1, 600), retained=retained + 0.01)
    (found,) = alarms(MonitorsConfig(), before, apart)
    assert "agree less" in found.text
    value, low, high = correlation(before, "reward", "retained")
    assert low < value < high and value > 0.9


def test_too_little_to_compare_with_is_no_alarm():
    before = sessions(10, edited=np.zeros(10))
    assert alarms(watching(Monitor("edited")), before, sessions(99, 1, edited=np.ones(99))) == []


def test_wrong_configs_and_metrics_are_refused():
    one = sessions(100, edited=RNG.normal(0, 1, 100))
    with pytest.raises(ValueError, match=r"no metric 'speed' of sessions; there are \['edited'\]"):
        alarms(watching(Monitor("speed")), one, one)
    with pytest.raises(ConfigError, match=r"config.monitors.rates\[0\].chart = 'shewhart'"):
        alarms(watching(Monitor("edited", Named("shewhart"))), one, one)
    with pytest.raises(ValueError, match="watched twice"):
        watching(Monitor("edited"), Monitor("edited"))
    with pytest.raises(ValueError, match="threshold"):
        dataclasses.replace(Cusum(), threshold=0.0)
