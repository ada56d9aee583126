"""Whole runs that sample with quantised matrices: resumed, replayed and sampled again bit for bit."""

from __future__ import annotations

import jax
import pytest

from models.families import PRESETS
from rl_code.config.read_config import ConfigError, build
from rl_code.metrics.values import read_metrics
from rl_code.recording.replay_training import replay
from rl_code.recording.replay_trajectories import find, play_again
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from rl_code.train import train
from tests.models.small import narrow_preset
from tests.rl_code.run.test_run_with_picks import settings_of

pytestmark = pytest.mark.usefixtures("traced_once")


def config_of(steps: int, weights: str = "int8") -> RunConfig:
    settings = settings_of(None, steps, attention=None, dtype="bfloat16", weights=weights)
    settings.checkpoint.update(every=1)
    settings.asynchrony.mode = "one_step"
    return build(RunConfig, settings)


@pytest.mark.long
def test_a_run_with_quantised_matrices_is_resumed_and_replayed_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset(num_kv_heads=1))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config_of(3), whole)
    train(config_of(1), parts)
    train(config_of(3), parts)
    stores = [GroupStore(folder / STORE) for folder in (whole, parts)]
    for step in range(3):
        one, other = (store.consumption(step)["weights"] for store in stores)
        assert one == other
    # the trainer of the version that sampled is another policy than the sampler, and near to it
    assert 1e-4 < read_metrics(whole)[0]["policy/mismatch_mean"] < 0.1
    with Run(config_of(3), parts, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * 3
    found = find(parts, 2, "0")
    (again,) = play_again(config_of(3), parts, found, [1])
    assert again.difference is None


def test_a_form_that_does_not_exist_is_refused_in_one_line():
    with pytest.raises(
        ConfigError, match=r"config\.rollout\.weights = 'int4': expected one of 'int8', 'fp8' or No"
    ):
        config_of(1, "int4")
