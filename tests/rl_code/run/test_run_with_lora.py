"""Whole runs in which adapters alone are trained: resumed and replayed bit for bit, and begun where
another one ended.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from models.families import PRESETS
from rl_code.checkpoint import arrays, checkpoint
from rl_code.config.read_config import ConfigError, build
from rl_code.recording.replay_training import replay
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from rl_code.train import train
from tests.models.small import narrow_preset
from tests.rl_code.run.test_run_with_picks import settings_of

pytestmark = pytest.mark.usefixtures("traced_once")

LORA = dict(rank=2, alpha=8.0)


def config_of(steps: int, lora=LORA, **model) -> RunConfig:
    settings = settings_of(None, steps, attention=None, dtype="bfloat16")
    settings.checkpoint.update(every=1)
    with settings.unlocked():
        settings.model.update(model)
        settings.model.lora = lora
    return build(RunConfig, settings)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset(num_layers=1, num_kv_heads=1))


@pytest.mark.long
def test_a_run_with_adapters_is_resumed_and_replayed_bit_for_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config_of(2), whole)
    train(config_of(1), parts)
    train(config_of(2), parts)
    stores = [GroupStore(folder / STORE) for folder in (whole, parts)]
    for step in range(2):
        one, other = (store.consumption(step)["weights"] for store in stores)
        assert one == other
    with Run(config_of(2), parts, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * 2
        first = arrays.flatten(run.init_model())
    last = checkpoint.load_parameters(parts).arrays
    changed = {name for name, x in first.items() if not np.array_equal(x, last[name])}
    assert changed == {name for name in first if ".lora." in name}
    # another run begins with the adapters merged, with or without new ones
    for lora in (None, dict(rank=1)):
        config = config_of(1, lora, preset=None, weights=str(parts))
        with Run(config, tmp_path / "next", "learner") as run, jax.set_mesh(run.mesh):
            begun = arrays.flatten(run.init_model())
        a, b = (last[f"layers.lora.down_{part}.value"] for part in "ab")
        wanted = last["layers.down.value"] + 4.0 * np.einsum("LDR,LRF->LDF", a, b)
        np.testing.assert_allclose(begun["layers.down.value"], wanted, rtol=1e-5, atol=1e-6)
        assert len(begun) == len(first) - (14 if lora is None else 0)


@pytest.mark.parametrize(
    "lora, change, words",
    [
        (dict(rank=0), {}, r"config\.model\.lora: rank=0 must be at least 1"),
        (dict(ranks=2), {}, r"config\.model\.lora\.ranks: no such key.*Did you mean 'rank'"),
        (LORA, {"model.change_methods": True}, "trains adapters alone: train the methods first"),
        (LORA, {"model.balance_rate": 0.1}, "which config.model.lora freezes; set it to 0"),
        (LORA, {"train.optimizer.muon_learning_rate": 0.1}, "Muon is for whole matrices"),
    ],
)
def test_what_adapters_cannot_be_with_is_refused_in_one_line(lora, change, words):
    settings = settings_of(None, 1, attention=None)
    with settings.unlocked():
        settings.model.lora = lora
        settings.update_from_flattened_dict(change)
    with pytest.raises(ConfigError, match=words):
        build(RunConfig, settings)
