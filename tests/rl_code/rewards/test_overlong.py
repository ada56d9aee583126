"""The penalty for episodes that come near their limit of tokens, on numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rl_code.config.read_config import ConfigError
from rl_code.environment.finished import FinishedEpisode, Grade, Usage
from rl_code.rewards.overlong import Overlong, penalty
from rl_code.types import Context, Limits, Reward, Task, Trajectory
from tests.rl_code.signals import signals

LIMITS = Limits(turns=4, tokens=100, turn_tokens=10, test_runs=1, command_s=1.0)


def finished(length: int, sampled: int, status: str = "submitted") -> FinishedEpisode:
    """An episode of ``length`` tokens, the last of which were sampled."""
    tokens = np.arange(length, dtype=np.int32)
    zeros = np.zeros(length, np.float32)
    context = Context(tokens, tokens >= length - sampled, zeros, zeros.astype(np.int32))
    trajectory = Trajectory("t", 0, 0, (context,), 1, (), status, Reward(0.0, {}))
    usage = Usage.of(trajectory)
    grade = Grade(submitted=status == "submitted")
    return FinishedEpisode(Task("t", ()), trajectory, {}, {}, grade, usage, limits=LIMITS)


@pytest.mark.parametrize(
    ("length", "expected"),
    # The paper's sizes: 20480 tokens at most, the last 4096 of them penalised.
    [(1, 0.0), (16384, 0.0), (17408, -0.25), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_the_penalty_equals_hand_computed_numbers(length, expected):
    assert penalty(length, 20480, 4096) == expected


@pytest.mark.parametrize(
    ("settings", "length", "sampled", "expected"),
    [
        ({}, 80, 5, 0.0),
        ({}, 85, 5, -0.25),
        ({}, 100, 5, -1.0),
        ({"within": 0.5}, 75, 5, -0.5),
        # 4 messages of 10 tokens: the last 8 of 40 are penalised
        ({"of": "sampled"}, 100, 32, 0.0),
        ({"of": "sampled"}, 40, 36, -0.5),
    ],
)
def test_the_length_is_that_of_the_limits(settings, length, sampled, expected):
    assert Overlong(**settings)(finished(length, sampled)) == pytest.approx(expected)


def test_an_episode_that_its_limit_ended_has_the_whole_penalty():
    assert Overlong()(finished(50, 5, "token_limit")) == -1.0
    (weighted,) = signals(dict(name="overlong", weight=0.5))
    assert weighted(finished(50, 5, "token_limit")) == -0.5


@pytest.mark.parametrize("settings", [{"within": 0.0}, {"within": 1.5}, {"of": "words"}])
def test_wrong_settings_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        Overlong(**settings)


def test_an_episode_without_limits_is_refused():
    with pytest.raises(ConfigError, match="limits of task t are not known"):
        Overlong()(dataclasses.replace(finished(5, 1), limits=None))
