"""A loss with a knob from outside of the tree, as docs/adding.md adds it."""

from __future__ import annotations

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from rl_code.config.read_config import ConfigError
from rl_code.learner.losses import PPO, LossTerms
from tests.drills.learning import configured, one_step, sampled_group

NAME = "my_lab.losses:DualClip"
# Steps that are large enough for the second epoch to have other ratios.
FAST = dict(learning_rate=0.3, clip_norm=None)


def terms_of(ratio: list[float], advantages: list[float]) -> LossTerms:
    logp = jnp.log(jnp.array([ratio]))
    ones = jnp.ones_like(logp)
    numbers = jnp.zeros(logp.shape, int)
    return LossTerms(logp, 0 * logp, jnp.array([advantages]), ones, numbers, ones)


def test_the_knob_does_what_it_says(outside):
    outside("A loss with a knob")
    loss = importlib.import_module("my_lab.losses").DualClip(most=2.0)
    ratio = [1.1, 5.0, 0.5, 5.0, 1.5]
    found, clipped = loss(terms_of(ratio, [1.0, 1.0, -1.0, -1.0, -1.0]))
    np.testing.assert_allclose(found[0], [-1.1, -1.28, 0.8, 2.0, 1.5], rtol=1e-6)
    assert clipped[0].tolist() == [False, True, True, True, False]


def test_a_config_trains_with_a_loss_from_outside(outside):
    outside("A loss with a knob")
    group = sampled_group([1.0, 0.0, 0.0])
    loss = dict(policy=dict(name=NAME, clip_high=0.2, most=2.0), aggregation="token")
    config = configured(loss=loss)
    assert config.train.loss.member.most == 2.0
    state, metrics = one_step(config, group)
    assert metrics["train/finite"] == 1.0 and metrics["train/tokens"] == 18
    # the first update on a batch has ratios of 1, at which the clip does not matter
    plain, expected = one_step(configured(loss=dict(policy="ppo")), group)
    for name in ("train/loss", "train/grad_norm"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-6)
    np.testing.assert_allclose(state.model.table, plain.model.table, rtol=1e-6)
    # and those of two epochs have others
    two = [
        one_step(configured(loss=dict(policy=policy), epochs=2, optimizer=FAST), group)[1]
        for policy in (dict(name=NAME, clip_high=0.0, clip_low=0.0), "ppo")
    ]
    assert two[0]["train/policy_loss"] != two[1]["train/policy_loss"]


def test_a_wrong_loss_is_named_when_the_config_is_built(outside):
    outside("A loss with a knob")
    for policy, words in {
        "my_lab.losses:DualClap": r"config\.train\.loss\.policy.*my_lab\.losses has no 'DualClap'",
        "my_lab.loses:DualClip": r"config\.train\.loss\.policy.*no module 'my_lab\.loses'",
        "ppoo": r"config\.train\.loss\.policy = 'ppoo'.*Did you mean 'ppo'",
    }.items():
        with pytest.raises(ConfigError, match=words):
            configured(loss=dict(policy=policy))
    with pytest.raises(ConfigError, match=r"config\.train\.loss\.policy: most=1\.0 must be above"):
        configured(loss=dict(policy=dict(name=NAME, most=1.0)))
    with pytest.raises(ConfigError, match=r"config\.train\.loss\.policy\.least"):
        configured(loss=dict(policy=dict(name=NAME, least=1.0)))


def test_members_of_the_tree_have_settings_of_their_own():
    config = configured(loss=dict(policy=dict(name="ppo", clip_low=0.1)))
    assert config.train.loss.member == PPO(clip_low=0.1, clip_high=0.28)
