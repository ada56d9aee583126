"""Credit for milestones on numbers worked out by hand, and that shaping is a baseline."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from rl_code.config import named
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.learner.advantages import ADVANTAGES, group_advantages
from rl_code.learner.milestones import Milestones, credit_of
from rl_code.types import Turn
from tests.rl_code.learner.conftest import make_group, make_trajectory

TURNS = (
    Turn("prompt", 0, 1, ""),
    Turn("assistant", 1, 3, ""),
    Turn("tool", 3, 4, ""),
    Turn("assistant", 4, 5, ""),
)


def trajectory(milestones, reward=0.0, status="submitted"):
    """A trajectory of two turns, the first of two sampled tokens and the second of one."""
    made = make_trajectory(
        [1, 2, 3, 4, 5], [0, 1, 1, 0, 1], prompt_length=1, reward=reward, status=status
    )
    return dataclasses.replace(made, turns=TURNS, milestones=milestones)


@pytest.mark.parametrize(
    ("gamma", "carry", "ends_at_zero", "expected"),
    [
        (1.0, 0.0, False, [0.5, -0.25, 0.75]),
        (0.5, 0.0, False, [0.25, -0.375, 0.25]),
        # 0.75 at the end; -0.25 + 0.5 * 0.75; 0.5 + 0.5 * 0.125
        (1.0, 0.5, False, [0.5625, 0.125, 0.75]),
        (1.0, 1.0, False, [1.0, 0.5, 0.75]),
        (1.0, 0.0, True, [0.5, -0.25, -0.25]),
        # minus the potential before each turn
        (1.0, 1.0, True, [0.0, -0.5, -0.25]),
        (0.9, 1.0, True, [0.0, -0.5, -0.25]),
    ],
)
def test_credit_equals_hand_computed_numbers(gamma, carry, ends_at_zero, expected):
    found = credit_of([0.0, 0.5, 0.25, 1.0], gamma, carry, ends_at_zero)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_turns_are_credited_beside_the_outcome():
    group = make_group([trajectory((0.0, 0.5, 1.0), 1.0), trajectory((0.0, 0.0, 0.25), 0.0)])
    member = named.make(
        ADVANTAGES, Named("milestones", {"outcome": "dr_grpo", "weight": 0.4}), "train.advantage"
    )
    first, second = group_advantages([group], member)[0]
    np.testing.assert_allclose(first, [0.5 + 0.2, 0.5 + 0.2, 0.5 + 0.2], rtol=1e-6)
    np.testing.assert_allclose(second, [-0.5, -0.5, -0.5 + 0.1], rtol=1e-6)
    assert first.dtype == np.float32


def test_a_group_of_failures_still_learns_from_milestones():
    group = make_group([trajectory((0.0, 0.0, 0.0)), trajectory((0.0, 0.5, 0.5))])
    first, second = Milestones()(group)
    np.testing.assert_array_equal(first, np.zeros(3))
    np.testing.assert_array_equal(second, np.float32([0.25, 0.25, 0.0]))


def test_a_fault_needs_no_milestones_and_others_do():
    fault = trajectory(None, status="fault")
    assert (
        group_advantages([make_group([fault, trajectory((0.0, 0.0, 0.0))])], Milestones())[0][0]
        == 0.0
    )
    with pytest.raises(ValueError, match=r"task0.* trajectory 0 has no milestones; set"):
        Milestones()(make_group([trajectory(None)]))


def test_a_baseline_of_potentials_leaves_the_expected_gradient_as_it_is():
    """Two turns with two choices each; the policy of the second depends on the first."""
    logits = np.array([0.3, -0.2, 0.5])  # of the first turn, and of the second after 0 and after 1
    reward = {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 0.5, (1, 1): 0.0}
    # before the second turn, by the first choice; and at the end, by both
    middle, end = {0: 0.25, 1: 0.75}, {pair: 0.5 for pair in reward}

    def gradient(carry, ends_at_zero, weight):
        total = np.zeros(3)
        for pair in itertools.product([0, 1], repeat=2):
            places = [0, 1 + pair[0]]
            p_one = 1 / (1 + np.exp(-logits[places]))
            chosen = np.where(pair, p_one, 1 - p_one)
            scores = np.array(pair) - p_one
            phi = [0.1, middle[pair[0]], end[pair]]
            credit = reward[pair] + weight * credit_of(phi, 1.0, carry, ends_at_zero)
            np.add.at(total, places, np.prod(chosen) * scores * credit)
        return total

    plain = gradient(1.0, True, 0.0)
    np.testing.assert_allclose(gradient(1.0, True, 3.0), plain, atol=1e-12)
    # credit of single turns prefers the first choice that reaches the milestone
    assert gradient(0.0, False, 3.0)[0] > plain[0]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"weight": -1.0}, "weight=-1.0 must be"),
        ({"gamma": 0.0}, "gamma=0.0 must be"),
        ({"carry": 2.0}, r"carry=2.0 in \[0, 1\]"),
        ({"outcome": "milestones"}, "must be another advantage"),
        ({"outcome": "gae"}, "outcome='gae' is made of values"),
        ({"outcome": "grpq"}, "outcome = 'grpq'.*Did you mean 'grpo'"),
    ],
)
def test_wrong_settings_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        named.make(ADVANTAGES, Named("milestones", settings), "config.train.advantage")
