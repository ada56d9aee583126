"""A run whose episodes vLLM samples: what its config refuses, and what it notes."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from configs import quickstart
from models.families import PRESETS
from rl_code.config.read_config import ConfigError, build
from rl_code.recording import replay_trajectories
from rl_code.recording.replay_training import replay
from rl_code.rollout.vllm_config import OFF, VllmConfig
from rl_code.run import vllm
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store import audit
from rl_code.train import train
from tests.models.small import narrow_preset, small_config
from tests.rl_code.rollout.fake_vllm import FakeVllm, serving


def settings(**changes):
    """The quickstart's smoke config with vLLM, and other values of dotted keys."""
    found = quickstart.get_config("smoke")
    found.rollout.engine.name = "vllm"
    with found.unlocked():
        for key, value in changes.items():
            *sections, last = key.split("__")
            at = found
            for section in sections:
                at = at[section]
            at[last] = value
    return found


def make(**changes) -> RunConfig:
    return build(RunConfig, settings(**changes))


def test_suites_are_played_by_this_projects_engine_of_the_same_shapes():
    config = make()
    assert config.rollout.vllm == VllmConfig()
    own = dataclasses.replace(config.rollout.engine, name="own")
    assert [suite.engine for suite in config.suites] == [own] * 2
    (other,) = make(suites=(settings().suites[0] | {"dtype": "bfloat16"},)).suites
    assert other.engine == dataclasses.replace(own, cache_dtype="bfloat16")


def test_without_vllm_nothing_changes():
    config = build(RunConfig, quickstart.get_config("smoke"))
    assert config.rollout.engine.name == "own" and config.suites[0].engine is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model__attention="moba"), r"config\.model\.attention = 'MoBA'"),
        (dict(model__lora=dict(rank=2), sft=None), r"config\.model\.lora = "),
        (dict(rollout__weights="int8"), r"config\.rollout\.weights = 'int8'"),
        (dict(rollout__picks="compare"), r"config\.rollout\.picks = 'compare'"),
        (dict(rollout__prefill={}), r"config\.rollout\.prefill = "),
        (dict(rollout__prefill_mesh={}), r"config\.rollout\.prefill_mesh = "),
        (dict(rollout__apart=True), r"config\.rollout\.apart = True .* set it to False"),
        (dict(rollout__forks={}), r"config\.rollout\.forks = "),
        (dict(rollout__engine__host_pages_mb=8.0), r"engine\.host_pages_mb = 8\.0"),
        (dict(rollout__engine__draft_tokens=2), r"engine\.draft_tokens = 2"),
        (dict(rollout__sampling=dict(top_k=5)), r"config\.rollout\.sampling\.top_k = 5"),
        (dict(rollout__sampling=dict(top_p=0.5)), r"config\.rollout\.sampling\.top_p = 0\.5"),
        (dict(rollout__sampling=dict(temperature=0.0)), r"sampling\.temperature = 0\.0"),
        (dict(model__preset="qwen3-30b-a3b"), "a model with experts is not supported"),
        (
            dict(reward__signals=(dict(name="rubric", criteria=(dict(name="a", question="b?"),)),)),
            "'rubric' asks the policy",
        ),
        (dict(rollout__vllm=dict(address="https://a:1/v1")), "must be like http://host:port"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_vllm_does_not_have_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_documents_are_refused():
    with pytest.raises(ConfigError, match=r"config\.documents = "):
        make(documents={}, model__attention="dense")


def test_suites_by_vllm_and_its_section_without_it_are_refused():
    with pytest.raises(ConfigError, match=r"suites\[0\]\.engine\.name = 'vllm'"):
        make(suites=(settings().suites[0] | {"engine": dict(name="vllm")},))
    own = quickstart.get_config("smoke")
    own.rollout.vllm = dict(address="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="and that is 'own'; set the name"):
        build(RunConfig, own)


def test_a_model_that_only_its_weights_tell_of_is_refused_too():
    vllm.check_model(small_config())
    window = PRESETS["gpt-oss-20b"]
    with pytest.raises(ConfigError, match=r"experts|attention"):
        vllm.check_model(window)
    with pytest.raises(ConfigError, match="cannot be pushed this model"):
        vllm.check_model(small_config(qkv_bias=True, qk_norm=True))


def test_trajectories_are_not_sampled_again(tmp_path):
    with pytest.raises(ConfigError, match="cannot be sampled again"):
        next(iter(replay_trajectories.play_again(make(), tmp_path, None, ())))


@pytest.mark.long
def test_a_run_trains_and_its_updates_replay(monkeypatch, tmp_path):
    """The server's model is the run's: it is read from the folder that the run writes."""
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset())
    found = settings(suites=(), sft=None, train__pack__drop_uninformative=False)
    found.tokenizer.update(texts=20, vocab_size=300)
    found.limits.update(turns=2, tokens=192, turn_tokens=8)
    found.rollout.engine.update(prompt_length=160, slots=8)
    found.train.update(steps=3, tasks_per_step=2, group_size=4, micro_batches=1)
    found.train.loss.update(entropy_coef=0.01)  # a gradient where no task is solved, too
    found.mesh.update(data=1)
    with Run(build(RunConfig, found), tmp_path / "first", "learner") as run:
        fake = FakeVllm(run.model_config, 192)
    with serving(fake) as url:
        found.rollout.vllm = dict(address=url, deadline_s=60.0)
        config = build(RunConfig, found)
        train(config, tmp_path / "run")
    workdir = tmp_path / "run"
    report = audit.check(workdir / STORE, 0)
    assert report.problems == [] and report.consumed == 3
    noted = json.loads((workdir / vllm.FILE).read_text())
    assert tuple(noted["off"]) == OFF and noted["server"]["version"] == "0.32.0"
    labels = fake.label.split(".")
    assert labels[1:] == ["2", "2"]  # pushes are counted from 0, as versions are
    with Run(config, workdir, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * 3
