"""A whole run of a model with experts whose load is balanced and whose choice is replayed: resumed,
it comes to the same bits.
"""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest

from models.families import PRESETS
from models.model_config import MoE
from rl_code.config.read_config import ConfigError, build
from rl_code.metrics.values import read_metrics
from rl_code.run.config import RunConfig
from rl_code.run.model import find_model_config
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from rl_code.train import train
from tests.models.small import narrow_preset
from tests.rl_code.run.test_run_with_picks import settings_of

pytestmark = pytest.mark.usefixtures("traced_once")

EXPERTS = MoE(experts=4, active=2, mlp_dim=16, scores="sigmoid", ranking_bias=True)


# Learned on two devices and sampled on three others, with six places for the four experts.
DEVICES = {
    "model": {"pad_experts_for": 6},
    "mesh": {"expert": 2},
    "rollout": {"apart": True, "mesh": {"expert": 3}},
}


def config_of(steps: int, devices: dict | None = None, **model) -> RunConfig:
    settings = settings_of("replay", steps, attention=None, dtype="bfloat16")
    settings.checkpoint.update(every=1)
    with settings.unlocked():
        settings.model.update(model)
        settings.update(devices or {})
    return build(RunConfig, settings)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    preset = narrow_preset(num_layers=1, num_kv_heads=1)
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(preset, qk_norm=True, moe=EXPERTS))


@pytest.mark.long
def test_a_run_with_experts_is_resumed_bit_for_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    balance = dict(balance_loss=0.01, balance_rate=0.001)
    train(config_of(2, DEVICES, **balance), whole)
    train(config_of(1, DEVICES, **balance), parts)
    train(config_of(2, DEVICES, **balance), parts)
    stores = [GroupStore(folder / STORE) for folder in (whole, parts)]
    for step in range(2):
        one, other = (store.consumption(step)["weights"] for store in stores)
        assert one == other
        for store in stores:
            for record in store.read(step):
                for t in record.group.trajectories:
                    assert t.contexts[0].choices["experts"].shape == (t.sampled.sum(), 1, 2)
    for row in read_metrics(whole):
        assert 1.0 <= row["experts/busiest"] <= row["experts/busiest_layer"] <= 2.0
        assert 0.0 < row["experts/entropy"] <= np.log(4) + 1e-6
        assert 0.5 < row["policy/experts_overlap"] <= 1.0


def test_balance_that_a_model_cannot_have_is_refused_in_one_line(monkeypatch):
    tokenizer = types.SimpleNamespace(vocab_size=300)
    origin = types.SimpleNamespace(files=None, check_methods=lambda *_: None)
    plain = dataclasses.replace(EXPERTS, ranking_bias=False)
    preset = dataclasses.replace(PRESETS["tiny"], moe=EXPERTS)
    config = config_of(1, balance_rate=0.001)
    assert find_model_config(config, origin, tokenizer).moe.balance_rate == 0.001
    for moe, words in (
        (None, "and the model has no experts"),
        (plain, r"balance_rate=0\.001 moves the ranking bias of experts"),
    ):
        monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(preset, moe=moe))
        config = dataclasses.replace(
            config, rollout=dataclasses.replace(config.rollout, picks=None)
        )
        with pytest.raises(ConfigError, match=words):
            find_model_config(config, origin, tokenizer)
