"""Whole runs whose episodes an agent of others plays: sampled, stored, trained on, resumed."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest

from configs import quickstart
from models.families import PRESETS
from rl_code.config.read_config import ConfigError, build
from rl_code.harness.agent import HarnessError
from rl_code.learner.parts import summary_turns
from rl_code.metrics.values import read_metrics
from rl_code.recording.replay_training import replay
from rl_code.recording.replay_trajectories import find, play_again
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.trajectory_log import read_trajectories
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from rl_code.train import train
from tests.models.small import narrow_preset
from tests.rl_code.harness.chats import MINIMAL


def config_of(
    steps=1, *, options=("text", "forgetful"), summaries="episode", group_size=2, **changes
) -> RunConfig:
    settings = quickstart.get_config("smoke")
    settings.suites = ()
    settings.sft = None
    settings.mesh.data = 1
    settings.tokenizer.update(texts=20, vocab_size=300)
    settings.limits.update(turns=3, tokens=512, turn_tokens=12, command_s=60.0)
    settings.rollout.engine.update(slots=4, prompt_length=256, prefill_tokens=64)
    settings.train.update(steps=steps, tasks_per_step=2, group_size=group_size, micro_batches=1)
    settings.train.optimizer.update(schedule="constant", warmup_steps=0, learning_rate=0.2)
    settings.train.pack.update(targets=96, slots=512, rows=4, drop_uninformative=False)
    settings.checkpoint.update(every=1)
    command = (sys.executable, str(MINIMAL), *options)
    with settings.unlocked():
        settings.limits.tools_s = 300.0
        del settings.reward
        settings.reward = dict(signals=("tests.rl_code.harness.eighth_tokens:eighth_tokens",))
        settings.train.parts = dict(summaries=summaries)
        settings.harness = dict(name="program", command=command)
        for name, value in changes.items():
            del settings[name]
            settings[name] = value
    return build(RunConfig, settings)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset(num_layers=2, num_kv_heads=1))


def test_an_agent_that_cannot_run_is_refused_before_the_workdir_is_claimed(tmp_path):
    harness = {"name": "mini_swe_agent", "python": str(tmp_path / "none")}
    with pytest.raises(HarnessError, match=r"harness\.python = .* cannot be started"):
        train(config_of(harness=harness), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_an_agent_of_others_hands_in_is_given_on(tmp_path):
    """As predictions are made of it."""
    seen = []
    with Run(config_of(), tmp_path) as run:
        task = run.task_sets.training[0]
        episode = run.episode(task, 0, 1, on_work=lambda *work: seen.append(work))
        episode.start()
        tokens = [*run.tokenizer.encode("submit"), min(episode.stop_ids)]
        assert episode.step(tokens, [-0.5] * len(tokens), [0] * len(tokens)) is None
        episode.finish()
    ((handed, index, files),) = seen
    assert handed == task and index == 1 and set(files) >= set(task.files)


@pytest.mark.long
@pytest.mark.usefixtures("traced_once")
def test_what_an_agent_of_others_did_is_stored_and_trained_on(tmp_path):
    config = config_of(2)
    train(config_of(1), tmp_path)
    train(config, tmp_path)  # goes on
    records = [GroupStore(tmp_path / STORE).read(step) for step in range(2)]
    trajectories = [t for step in records for record in step for t in record.group.trajectories]
    assert len(trajectories) == 8
    assert max(len(t.contexts) for t in trajectories) > 1  # a tree: the agent forgets
    for trajectory in trajectories:
        assert trajectory.status in ("turn_limit", "token_limit")
        assert trajectory.sampled.sum() > 0
        assert np.isfinite(trajectory.logprobs).all()
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["policy/mismatch_max"] < 1e-3  # sampler and trainer agree to rounding
        assert np.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0
    # the page's words of a tree
    (group, *_) = read_trajectories(tmp_path, 1)
    assert group["prompt"]["text"].startswith("<|bos|>")
    # what was recorded gives the same updates again
    with Run(config, tmp_path, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * 2
    with pytest.raises(ConfigError, match="cannot be sampled again"):
        next(play_again(config, tmp_path, find(tmp_path, 1, "0"), [0]))


@pytest.mark.long
@pytest.mark.usefixtures("traced_once")
def test_summaries_that_an_agent_of_others_asks_for_are_left_out_of_training(tmp_path):
    limits = dict(turns=4, tokens=512, turn_tokens=24, test_runs=0, command_s=60.0, tools_s=300.0)
    changes = dict(options=("text", "compacting"), summaries="none", limits=limits)
    train(config_of(1, **changes), tmp_path)
    config = config_of(2, **changes)
    train(config, tmp_path)  # goes on
    for step, row in enumerate(read_metrics(tmp_path)):
        groups = [record.group for record in GroupStore(tmp_path / STORE).read(step)]
        trajectories = [t for group in groups for t in group.trajectories]
        found = [turn for t in trajectories for turn in summary_turns(t)]
        # every context but the first begins with one
        assert found and len(found) == sum(len(t.contexts) - 1 for t in trajectories)
        sampled = sum(int(t.sampled.sum()) for t in trajectories)
        assert row["train/tokens"] == sampled - sum(turn.end - turn.start for turn in found)
        assert row["policy/mismatch_max"] < 1e-3
    with Run(config, tmp_path, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(harness="mini"), "'mini_swe_agent'"),
        (dict(harness=dict(name="program", comand=("a",))), "comand"),
        (dict(protocol="completion"), "has no place for conversations"),
        (dict(harness="rl_code.harness.program:end"), "is no rl_code.harness.agent.Agent"),
    ],
)
def test_a_wrong_harness_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**changes)


@pytest.mark.long
@pytest.mark.usefixtures("traced_once")
def test_a_reward_that_can_be_earned_rises(tmp_path):
    limits = dict(turns=1, tokens=512, turn_tokens=12, test_runs=0, command_s=60.0, tools_s=300.0)
    train(config_of(7, options=("text",), group_size=8, limits=limits), tmp_path)
    rewards = [row["reward/total"] for row in read_metrics(tmp_path)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards
