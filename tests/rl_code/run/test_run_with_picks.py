"""Whole runs in which the sampler's picks are noted: resumed, replayed, and told in the metrics."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from configs import quickstart
from models.families import PRESETS
from rl_code.config.read_config import ConfigError, build
from rl_code.metrics.values import read_metrics
from rl_code.recording import kept_config
from rl_code.recording.replay_training import replay
from rl_code.recording.replay_trajectories import find, play_again
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from rl_code.train import train
from tests.models.small import narrow_preset

pytestmark = pytest.mark.usefixtures("traced_once")

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
    settings.train.optimizer.update(schedule="constant", warmup_steps=0, learning_rate=0.01)
    settings.train.loss.update(entropy_coef=0.1)
    settings.train.pack.update(targets=96, drop_uninformative=False)
    settings.checkpoint.update(every=2)
    with settings.unlocked():
        settings.model.attention = attention
        settings.rollout.update(picks=picks, **rollout)
    return settings


def config_of(*arguments, **rollout) -> RunConfig:
    return build(RunConfig, settings_of(*arguments, **rollout))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset(num_layers=2, num_kv_heads=1))


@pytest.mark.long
def test_a_run_that_replays_picks_is_resumed_and_replayed_bit_for_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    rollout = dict(dtype="bfloat16")
    config = config_of("replay", 4, **rollout)
    train(config, whole)
    train(config_of("replay", 2, **rollout), parts)
    train(config, parts)
    stores = [GroupStore(folder / STORE) for folder in (whole, parts)]
    for step in range(4):
        one, other = (store.consumption(step)["weights"] for store in stores)
        assert one == other
        one, other = (
            [
                t.contexts[0].choices["blocks"].tobytes()
                for record in store.read(step)
                for t in record.group.trajectories
            ]
            for store in stores
        )
        assert one == other and any(one)
    for row in read_metrics(whole):
        assert 0.5 < row["policy/picks_overlap"] <= 1.0
        assert 0.0 <= row["policy/picks_equal"] <= row["policy/picks_overlap"]
    with Run(config, parts, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * 4
    # a trajectory that is sampled again chooses the same blocks
    found = find(parts, 1, "0")
    (again,) = play_again(kept_config.read(parts), parts, found, [1])
    assert again.difference is None
    (there,), (now,) = again.recorded.contexts, again.now.contexts
    assert np.array_equal(there.choices["blocks"], now.choices["blocks"])


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
