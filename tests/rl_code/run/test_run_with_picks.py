"""Which runs note the sampler's picks. test_run_with_documents.py has a whole run that does."""

from __future__ import annotations

import pytest

from configs import quickstart
from rl_code.config.read_config import ConfigError, build
from rl_code.run.config import RunConfig
from tests.rl_code.run.lookups import constant_rate

NSA = dict(name="nsa", block=8, length=4, stride=4, picks=4, initial=1, local=1, window=8)


def settings_of(picks, steps=2, attention=NSA, **rollout):
    settings = quickstart.get_config("smoke")
    settings.suites = ()
    settings.sft = None
    settings.mesh.data = 1
    settings.tokenizer.update(texts=20, vocab_size=300)
    settings.limits.update(turns=3, tokens=256, turn_tokens=16)
    settings.rollout.engine.update(slots=4, prompt_length=160, prefill_tokens=64)
    settings.train.update(steps=steps, tasks_per_step=2, group_size=2, micro_batches=1)
    constant_rate(settings)
    settings.train.loss.update(entropy_coef=0.1)
    settings.train.pack.update(targets=96, drop_uninformative=False)
    settings.checkpoint.update(every=2)
    with settings.unlocked():
        settings.model.attention = attention
        settings.rollout.update(picks=picks, **rollout)
    return settings


def config_of(*arguments, **rollout) -> RunConfig:
    return build(RunConfig, settings_of(*arguments, **rollout))


def test_picks_that_cannot_be_noted_are_refused_in_one_line():
    moba = dict(name="moba", block=8, picks=2)
    settings = settings_of("replay", attention=("dense", moba))
    with pytest.raises(
        ConfigError, match=r"no layer has attention whose picks can be noted \(nsa, dsa\)"
    ):
        build(RunConfig, settings)
    settings = settings_of("compare")
    settings.train.pack.prompt_slots = 256
    with pytest.raises(ConfigError, match="an update in two phases"):
        build(RunConfig, settings)
    with pytest.raises(ValueError, match="expected one of 'compare', 'replay' or None"):
        config_of("always")


def test_only_the_engine_of_training_notes():
    settings = settings_of("compare")
    suite = quickstart.held_out("held_out", level=2, count=2)
    settings.suites = (suite | dict(limits=dict(settings.limits) | dict(turns=1)),)
    config = build(RunConfig, settings)
    assert config.rollout.engine.note_picks and config.train.picks == "compare"
    assert not config.suites[0].engine.note_picks
    assert not config_of(None).rollout.engine.note_picks
