"""The gate refuses what is worse, what says too little, and rates out of bounds, and says why."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from people.realtime.gate import GateConfig, RateBound, judge
from people.realtime.parts import Played
from rl_code.evaluation.paired import paired_difference

TASKS = 40
CONFIG = GateConfig(margin=0.05, anchor_margin=0.1, least_tasks=20)


def played(shift: float = 0.0, tasks: int = TASKS, seed: int = 0, **rates: float) -> Played:
    """Scores of tasks that differ in difficulty, all shifted, with a little noise."""
    rng = np.random.default_rng(seed)
    scores = np.linspace(0.2, 0.8, tasks) + shift + rng.normal(0, 0.01, tasks)
    return Played({f"t{i}": float(one) for i, one in enumerate(scores)}, {"edited": 0.9} | rates)


def verdict(candidate: Played, deployed: Played, anchor: Played, config: GateConfig = CONFIG):
    return judge(config, {"s": candidate}, {"s": deployed}, {"s": anchor})


def test_a_candidate_as_good_passes_and_one_that_is_worse_does_not():
    assert verdict(played(seed=1), played(), played()).passed
    worse = verdict(played(-0.06, seed=1), played(), played())
    assert not worse.passed
    assert "against the deployed version" in worse.reason


def test_the_interval_is_the_paired_one():
    candidate, deployed = played(0.02, seed=1), played()
    check = verdict(candidate, deployed, played()).checks[0]
    tasks = sorted(deployed.scores)
    expected = paired_difference(
        [deployed.scores[task] for task in tasks], [candidate.scores[task] for task in tasks]
    )
    assert check.value == expected.paired


def test_many_small_steps_down_are_stopped_by_the_anchor():
    found = verdict(played(-0.15, seed=1), played(-0.12), played())
    assert [check.passed for check in found.checks] == [True, False]
    assert "against the anchor version" in found.reason


def test_few_tasks_are_no_evidence():
    found = verdict(played(0.1, tasks=5), played(tasks=5), played(tasks=5))
    assert not found.passed and "5 tasks, at least 20 needed" in found.reason


@pytest.mark.parametrize(
    ("bound", "value", "passed"),
    [
        (dict(least=0.8), 0.85, True),
        (dict(least=0.8), 0.75, False),
        (dict(most=0.95), 0.97, False),
        (dict(fall=0.05), 0.86, True),
        (dict(fall=0.05), 0.84, False),
        (dict(rise=0.05), 0.96, False),
    ],
)
def test_rates_have_bounds(bound, value, passed):
    config = dataclasses.replace(CONFIG, rates=(RateBound("edited", **bound),))
    found = verdict(played(seed=1, edited=value), played(), played(), config)
    assert found.passed is passed
    assert passed or "edited" in found.reason


def test_what_cannot_be_compared_is_an_error():
    with pytest.raises(ValueError, match="the same suites"):
        judge(CONFIG, {}, {}, {})
    with pytest.raises(ValueError, match="played other tasks: t39"):
        verdict(played(tasks=39), played(), played())
    config = dataclasses.replace(CONFIG, rates=(RateBound("tokens", most=1.0),))
    with pytest.raises(ValueError, match=r"no rate 'tokens'; there are \['edited'\]"):
        verdict(played(), played(), played(), config)
    with pytest.raises(ValueError, match="needs one of"):
        RateBound("edited")
