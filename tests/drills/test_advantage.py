"""An advantage with per-token credit from outside of the tree, as docs/adding.md adds it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rl_code.config import named
from rl_code.config.read_config import ConfigError
from rl_code.learner.advantages import ADVANTAGES, group_advantages
from rl_code.learner.batching import pack
from tests.drills.learning import configured, one_step, sampled_group

ADVANTAGE = dict(name="my_lab.advantages:BlameMalformed", penalty=0.2)


def test_credit_reaches_the_tokens_it_is_meant_for(outside):
    outside("An advantage with per-token credit")
    config = configured(advantage=ADVANTAGE)
    member = named.make(ADVANTAGES, config.train.advantage, "config.train.advantage")
    group = sampled_group([1.0, 0.0], malformed=(1,))
    (values,) = group_advantages([group], member)
    np.testing.assert_allclose(values[0], [0.5] * 6)
    np.testing.assert_allclose(values[1], [-0.5] * 3 + [-0.7] * 3)
    batch, _ = pack([group], [values], config.train.pack, version=0)
    found = {number: batch.advantages[batch.trajectories == number].tolist() for number in range(2)}
    np.testing.assert_allclose(found[1], [-0.5] * 3 + [-0.7] * 3, rtol=1e-6)
    # a fault counts for nothing, whatever a member says of it
    fault = dataclasses.replace(group.trajectories[1], status="fault")
    (values,) = group_advantages(
        [dataclasses.replace(group, trajectories=(*group.trajectories[:1], fault))], member
    )
    assert values[1] == 0.0 and not np.any(values[0])


def test_a_config_trains_with_credit_from_outside(outside):
    outside("An advantage with per-token credit")
    group = sampled_group([1.0, 0.0, 0.0], malformed=(1, 2))
    loss = dict(policy="ppo", aggregation="token")
    _, blamed = one_step(configured(advantage=ADVANTAGE, loss=loss), group)
    none = dict(name=ADVANTAGE["name"], penalty=0.0)
    _, plain = one_step(configured(advantage=none, loss=loss), group)
    _, built_in = one_step(configured(advantage="dr_grpo", loss=loss), group)
    assert plain["train/loss"] == built_in["train/loss"]
    assert plain["train/grad_norm"] == built_in["train/grad_norm"]
    # at a ratio of 1 the loss is minus the mean advantage: 6 of the 18 tokens get 0.2 less
    np.testing.assert_allclose(blamed["train/loss"] - plain["train/loss"], 0.2 * 6 / 18, rtol=1e-5)
    assert blamed["train/finite"] == 1.0


def test_a_wrong_advantage_is_named_when_the_config_is_built(outside):
    outside("An advantage with per-token credit")
    with pytest.raises(ConfigError, match=r"config\.train\.advantage.*Did you mean 'dr_grpo'"):
        configured(advantage="dr_gpro")
    with pytest.raises(ConfigError, match=r"config\.train\.advantage\.penalti"):
        configured(advantage=dict(name=ADVANTAGE["name"], penalti=0.2))
    with pytest.raises(ConfigError, match=r"config\.train\.advantage: eps=-1\.0"):
        configured(advantage=dict(name="grpo", eps=-1.0))


def test_credit_for_another_number_of_tokens_is_refused():
    group = sampled_group([1.0, 0.0])
    values = group_advantages([group], lambda group: [np.zeros(5), np.zeros(6)])
    with pytest.raises(ValueError, match=r"trajectory 0: advantages of shape \(5,\) for 6 sampled"):
        pack([group], values, configured().train.pack, version=0)
