"""Demonstrations, milestones, sub-tasks and refills in one run: it resumes, replays and forks as any
other.

Nothing here is replaced: tasks, episodes, sandboxes, engine, store, weights, update.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import pytest

from configs import quickstart
from models.families import PRESETS
from rl_code.config.read_config import build
from rl_code.metrics.values import read_metrics
from rl_code.recording.fork import fork
from rl_code.recording.replay_training import replay
from rl_code.recording.replay_trajectories import find, play_again
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store import audit
from rl_code.store.store import GroupStore
from rl_code.train import train
from rl_code.types import Group
from tests.models.small import narrow_preset
from tests.rl_code.recorded_runs import fail, strike

pytestmark = [pytest.mark.usefixtures("traced_once"), pytest.mark.long]
STEPS = 3
# The last step has none, so nobody solves anything there and it is refilled.
DEMONSTRATED = 2


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset())


def make_config() -> RunConfig:
    settings = quickstart.get_config("smoke")
    settings.suites = ()
    settings.sft = None
    settings.tokenizer.update(texts=20, vocab_size=300)
    settings.limits.update(turns=2, tokens=256, turn_tokens=64)
    settings.train.update(steps=STEPS, tasks_per_step=2, group_size=3, micro_batches=1)
    settings.train.pack.update(rows=6)
    settings.checkpoint.update(every=1)
    with settings.ignore_type(), settings.unlocked():
        settings.train.demonstrations = {"steps": DEMONSTRATED}
        settings.train.refill = {"most": 2}
        settings.train.advantage = dict(name="milestones", outcome="pkpo", weight=0.25)
        settings.milestones = {}
        of = dict(settings.tasks)
        settings.tasks = dict(name="subtasks", of=of, by="steps")
        settings.reward.signals = ("tests", dict(name="overlong", weight=0.1))
        settings.asynchrony = dict(mode="one_step")
    return build(RunConfig, settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", narrow_preset())
        train(make_config(), workdir)
    return workdir


def weights(workdir: Path) -> list[str]:
    store = GroupStore(workdir / STORE)
    return [store.consumption(step)["weights"] for step in store.consumed()]


def groups_of(workdir: Path, steps) -> list[Group]:
    store = GroupStore(workdir / STORE)
    return [record.group for step in steps for record in store.read(step)]


def test_every_group_has_one_demonstration_that_solves_its_task(whole):
    for group in groups_of(whole, range(DEMONSTRATED)):
        *own, shown = group.trajectories
        assert shown.demonstrated and shown.solved and shown.status == "submitted"
        assert not any(one.demonstrated for one in own) and len(group.own) == len(own) == 2
        assert shown.milestones[-1] == 1.0
        for one in group.trajectories:
            messages = sum(turn.role == "assistant" for turn in one.turns)
            assert one.status == "fault" or len(one.milestones) == messages + 1
    report = audit.check(whole / STORE, 1)
    assert report.problems == [] and report.consumed == STEPS
    for row in read_metrics(whole)[:DEMONSTRATED]:
        assert row["reward/demonstrated"] == 1.0 and 0.0 < row["policy/demonstrated"] < 1.0
        assert row["policy/demonstrated_logp"] < 0.0
        # of the sampler's own tokens
        assert row["rollout/staleness_max"] > 0 or row["policy/mismatch_max"] < 1e-3


def test_a_step_without_demonstrations_is_refilled(whole):
    last = STEPS - 1
    assert not any(
        one.demonstrated for group in groups_of(whole, [last]) for one in group.trajectories
    )
    kinds = [item.kind for item in GroupStore(whole / STORE).items(last)]
    assert "refill" in kinds and set(kinds) == {"train", "refill"}
    *_, row = read_metrics(whole)
    assert row["tasks/refills"] > 0 and "reward/demonstrated" not in row
    assert row["tasks/drawn"] == len(kinds) and row["policy/demonstrated"] == 0.0


def test_training_on_it_is_replayed_bit_for_bit(whole):
    with Run(make_config(), whole, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * STEPS


def test_demonstrations_are_played_again_to_the_token(whole):
    found = find(whole, 1, "0")
    every = list(play_again(make_config(), whole, found, range(3)))
    assert [again.difference for again in every] == [None, None, None]
    assert [again.now.demonstrated for again in every] == [None, None, True]
    assert every[-1].now.milestones == every[-1].recorded.milestones


def test_a_run_with_demonstrations_that_was_interrupted_ends_as_one_that_was_not(
    whole, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        strike(patch, 1, fail)
        with pytest.raises(OSError, match="struck"):
            train(make_config(), tmp_path)
    train(make_config(), tmp_path)
    assert weights(tmp_path) == weights(whole)


def test_a_fork_with_demonstrations_ends_as_the_run_itself(whole, tmp_path):
    fork(whole, tmp_path / "fork", 2, make_config())
    train(make_config(), tmp_path / "fork")
    assert weights(tmp_path / "fork") == weights(whole)


def test_a_fork_may_do_without_demonstrations_from_a_step_on(whole, tmp_path):
    config = make_config()
    plain = dataclasses.replace(
        config, train=dataclasses.replace(config.train, demonstrations=None)
    )
    fork(whole, tmp_path / "fork", 1, plain)
    train(plain, tmp_path / "fork")
    assert weights(tmp_path / "fork")[:1] == weights(whole)[:1]
    later = groups_of(tmp_path / "fork", range(1, STEPS))
    assert not any(one.demonstrated for group in later for one in group.trajectories)
