"""The stages of configs/convert_attention.py, one after another on the model of the one before."""

from __future__ import annotations

import jax
import pytest

from configs import convert_attention
from models.families import PRESETS
from rl_code import sft
from rl_code.config.read_config import ConfigError, build
from rl_code.host.stop import StopRequest
from rl_code.metrics.values import read_metrics
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from tests.models.small import narrow_preset


def stage(name: str, folder, weights=None) -> list[dict]:
    """The metrics of a stage's warm start, of a model whose layers all have the stage's method."""
    given = convert_attention.get_config(f"{name}_smoke")
    given.model.attention = given.model.attention[-1:]
    given.mesh.data = 1
    given.tokenizer.texts = 20
    given.model.weights = "" if weights is None else str(weights / "sft")
    with Run(build(RunConfig, given), folder) as run, jax.set_mesh(run.mesh), StopRequest() as stop:
        sft.warm_start(run, stop)
    return list(read_metrics(folder / "sft"))


@pytest.mark.long
def test_the_loss_on_held_out_tasks_is_told_before_and_after(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny_reader", narrow_preset())
    first, last = stage("latent", tmp_path / "latent")
    assert 0 < last["sft/held_out_loss"] < first["sft/held_out_loss"]
    begun, then = stage("dsa_indexer", tmp_path / "dsa_indexer", tmp_path / "latent")
    # an indexer changes nothing while all keys are attended to
    assert begun["sft/held_out_loss"] == pytest.approx(last["sft/held_out_loss"], rel=1e-4)
    assert begun["indexer/loss"] > 0 and then["sft/held_out_loss"] > 0


@pytest.mark.parametrize("name", convert_attention.STAGES)
def test_every_stage_is_a_config(name):
    full, smoke = (convert_attention.get_config(name + end) for end in ("", "_smoke"))
    assert build(RunConfig, full).sft.held_out == 48
    assert build(RunConfig, smoke).model.change_methods == (name in ("nsa", "dsa_indexer"))


def test_held_out_tasks_are_those_of_a_suite(tmp_path):
    given = convert_attention.get_config("smoke")
    given.suites = ()
    given.tokenizer.texts = 20
    with Run(build(RunConfig, given), tmp_path) as run:
        with pytest.raises(ConfigError, match=r"sft\.held_out = 4 demonstrates tasks of the first"):
            run.demonstrations.held_out(0)
