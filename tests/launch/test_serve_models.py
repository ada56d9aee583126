"""Further checkpoints and adapters are found, and refused where they do not fit what is served."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from launch.serve_models import ServedCheckpoint, load_adapters, load_also, make_router
from models.families import PRESETS
from models.lora import LoRA, trained, with_trained
from people.serving.models import Models
from people.serving.router import Shares, Thompson
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config.read_config import ConfigError, build
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.serving import AutoConfig
from rl_code.run.workdir import CONFIG_FILE
from tests.models.small import narrow_preset
from tests.rl_code.run.test_run_with_picks import settings_of

ADAPTERS = LoRA(rank=2, alpha=5.0, targets=("q_proj", "o_proj"))


class Service:
    """An engine that computes nothing."""

    def __init__(self, weights, version):
        self.weights = weights

    def load(self, weights):
        self.weights = weights
        done = Future()
        done.set_result(None)
        return done


def test_a_wrong_source_is_refused():
    assert ServedCheckpoint.read("a@3:runs/x:y", "also") == ServedCheckpoint(
        "a", 3, Path("runs/x:y")
    )
    assert ServedCheckpoint.read("a:runs/x", "also") == ServedCheckpoint("a", None, Path("runs/x"))
    for text in ("a", "a@:x", "a@b:x", ":x", "a@3:"):
        with pytest.raises(ConfigError, match="write name@step:workdir"):
            ServedCheckpoint.read(text, "also")


def test_a_run_that_was_trained_with_other_documents_is_refused(tmp_path):
    (tmp_path / CONFIG_FILE).write_text('{"documents": {"longest": 64}}')
    run = SimpleNamespace(config=SimpleNamespace(documents=None))
    for source in (tmp_path, tmp_path / "sft"):  # its warm start too
        with pytest.raises(ConfigError, match=f"also=a.*{tmp_path}.*another mask"):
            load_also(run, tmp_path, Models(Service), [f"a:{source}"])


def test_a_router_is_made_of_what_is_served():
    models = Models(Service)
    for name, version in (("a", 1), ("a", 2), ("b", 7)):
        models.load(name, version, None)
    assert make_router(None, models, "a@1", AutoConfig()).arms == ("a@1",)
    all_arms = make_router("thompson", models, "a@1", AutoConfig())
    assert isinstance(all_arms, Thompson) and all_arms.arms == ("a@1", "a@2", "b@7")
    assert make_router("thompson:a@2,b", models, "a@1", AutoConfig()).arms == ("a@2", "b@7")
    shares = make_router("shares:a@1=0.9,b=0.1", models, "a@1", AutoConfig())
    assert isinstance(shares, Shares) and shares.arms == ("a@1", "b@7")
    for text, why in (
        ("shares:a=0.5,b=0.5", "'a' must be one of a@1, a@2, b@7"),
        ("thompson:c", "'c' must be one of"),
        ("shares:a@1=0.5,b=0.1", "sum up to 0.6"),
        ("shares:a@1", "must be like a@1=0.5"),
        ("shares:", "at least one"),
        ("best", "write shares:a@1=0.9"),
    ):
        with pytest.raises(ConfigError, match=why):
            make_router(text, models, "a@1", AutoConfig())


@pytest.mark.long
def test_checkpoints_and_adapters_of_runs_are_served(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset())
    settings = settings_of(None, 1, attention=None)
    plain, adapted = tmp_path / "plain", tmp_path / "adapted"

    def keep(folder, model, step):
        with Checkpoints(folder, {"model": {"weights": ""}}, keep=3) as checkpoints:
            checkpoints.save(step, {"model": model}, {})

    with Run(build(RunConfig, settings), plain) as run:
        weights = run.init_model()
        keep(plain, weights, 4)
        moved = jax.tree.map(lambda x: x + 1, weights)
        keep(plain, moved, 5)
    with settings.unlocked():
        settings.model.lora = dataclasses.asdict(ADAPTERS)
    with Run(build(RunConfig, settings), adapted) as of_adapters:
        model = of_adapters.init_model()
        part = jax.tree.map(lambda x: x + 0.5, trained(model))
        keep(adapted, with_trained(model, part), 9)
    with settings.unlocked():
        settings.model.lora = None
    with Run(build(RunConfig, settings), plain) as run:
        models = Models(Service)
        models.load("policy", 4, weights)
        load_also(run, plain, models, [f"other:{plain}"])
        load_adapters(run, plain, models, "policy@4", weights, [f"tuned:{adapted}"])
        assert models.versions() == ["policy@4", "other@5", "tuned@9"]
        other, _ = models.take("other", "ada", "")
        assert_equal(other.host.weights, moved)
        tuned, _ = models.take("tuned@9", "ada", "")
        assert_equal(tuned.host.adapters[tuned.adapter], part)
        base, _ = models.take("policy", "ada", "")
        assert base.host is tuned.host
        for load, why in (
            (lambda: load_also(run, plain, models, [f"policy@4:{plain}"]), "served already"),
            (lambda: load_also(run, plain, models, [f"x:{tmp_path}"]), "is no workdir of a run"),
            (
                lambda: load_adapters(run, plain, models, "policy@4", weights, [f"x:{plain}"]),
                "trained no adapters",
            ),
            (
                lambda: load_adapters(run, plain, models, "other@5", moved, [f"x:{adapted}"]),
                "adapts other weights than those of other@5",
            ),
        ):
            with pytest.raises(ConfigError, match=why):
                load()


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
