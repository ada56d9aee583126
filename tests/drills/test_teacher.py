"""Feedback and a divergence from outside of the tree, as docs/adding.md adds them."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_code.config.read_config import ConfigError
from rl_code.learner.distillation import Taught
from rl_code.learner.learner import Learner
from rl_code.learner.teacher import first_state
from tests.drills.learning import configured, sampled_group
from tests.rl_code.learner.conftest import make_toy

FEEDBACK = dict(name="my_lab.feedback:Complaints", words="Do not:")
DIVERGENCE = dict(name="my_lab.divergences:Forward", most=1.0)


def one_step(config, group):
    """The metrics of one step with a teacher, and the feedback that was asked for."""
    asked = []

    def prompt(task, text):
        asked.append(text)
        return [5, 6, 7, 8]

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    learn = Learner(config.train, here, make_toy(), None, prompt)
    state = first_state(config.train, jax.tree.map(lambda x: x.copy(), make_toy()))
    return learn(state, [group], 0)[1], asked


def test_a_config_trains_with_feedback_from_outside(outside):
    outside("Feedback for a teacher")
    config = configured(teacher=dict(feedback=FEEDBACK, slots=64))
    group = sampled_group([1.0, 0.0, 0.0], malformed=(1,))
    metrics, asked = one_step(config, group)
    assert asked == ["Do not:\nno such tool"]
    assert metrics["teacher/share"] == pytest.approx(1 / 3) and metrics["train/finite"] == 1.0
    assert not config.train.teacher.told.reads_test_errors


def test_a_config_trains_with_a_divergence_from_outside(outside):
    outside("A divergence from a teacher")
    config = configured(teacher=dict(average=0.9, divergence=DIVERGENCE, slots=64))
    metrics, _ = one_step(config, sampled_group([1.0, 0.0, 0.0]))
    assert metrics["teacher/share"] == 1.0
    # the average is the policy itself before the first update
    assert float(metrics["teacher/divergence"]) == pytest.approx(0.0, abs=1e-6)


def test_the_divergence_is_that_by_hand(outside):
    outside("A divergence from a teacher")
    form = importlib.import_module("my_lab.divergences").Forward(most=0.3)
    policy, teacher = (jnp.log(jnp.array([[p]])) for p in ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]))
    taught = Taught(jnp.ones((1, 1)), jnp.zeros((1, 1)))
    found = form(policy, None, taught, lambda: teacher)
    # 0.25 ln(1 / 2), and 0.5 ln 2 = 0.347 cut to 0.3
    np.testing.assert_allclose(found, [[0.25 * np.log(0.5) + 0.3]], rtol=1e-6)


def test_a_wrong_feedback_is_named_when_the_config_is_built(outside):
    outside("Feedback for a teacher")
    with pytest.raises(ConfigError, match=r"config\.train\.teacher\.feedback\.word\b"):
        configured(teacher=dict(feedback=FEEDBACK | dict(word="No")))
    with pytest.raises(ConfigError, match=r"teacher\.feedback = 'hit'.*Did you mean 'hint'"):
        configured(teacher=dict(feedback="hit"))
