"""A run that retrains its reward model resumes, forks and remakes its versions with the same bits.

Training of both models is real. What samples is a stand-in (``tests.rl_code.recorded_runs``), whose
episodes are paid by the real signal.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from rl_code.checkpoint import checkpoint
from rl_code.config.read_config import ConfigError, build
from rl_code.environment.finished import FinishedEpisode, Grade, Usage
from rl_code.metrics.values import read_metrics
from rl_code.recording.fork import fork
from rl_code.rewards import scorer as scorer_module
from rl_code.rewards.combine import RewardConfig, combine, find_signals
from rl_code.rewards.reward_model import FOLDER
from rl_code.rewards.scorer import Scorer
from rl_code.run import retraining as retraining_module
from rl_code.run.config import RunConfig
from rl_code.run.retraining import Retraining, retrained
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store.errors import StoreError
from rl_code.store.store import GroupStore
from rl_code.tasks.refill import RefillConfig
from rl_code.train import train
from rl_code.types import Group
from tests.rl_code.recorded_runs import (
    STEPS,
    VOCAB,
    deterministic,
    fail,
    make_config,
    replayed,
    sameness,
    strike,
    with_stand_in,
)
from tests.rl_code.rewards.folders import make_folder
from tests.rl_code.rollout.test_actor import FakeScheduler

pytestmark = pytest.mark.long
FIT = dict(updates=3, rows=2, optimizer=dict(learning_rate=0.01))


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    with with_stand_in():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "rm")


def configured(folder: Path, mode: str = "one_step", bound: int = 1, **retrain) -> RunConfig:
    """A run that is paid by a reward model and trains it again every second step."""
    signal = dict(name="reward_model", folder=str(folder), retrain=dict(every=2, fit=FIT) | retrain)
    reward = build(RewardConfig, dict(signals=(signal,)))
    return dataclasses.replace(make_config(mode, bound), reward=reward)


class Paid(FakeScheduler):
    """Episodes whose work is a function of their last token, and which the run's signals pay."""

    def __init__(self, run: Run):
        super().__init__(vocab=VOCAB)
        self._run = run

    def step(self):
        return [(item, self._pay(group)) for item, group in super().step()]

    def _pay(self, group: Group) -> Group:
        signals = find_signals(self._run.config.reward)
        members = []
        for one in group.trajectories:
            last = int(one.tokens[-1])
            good = last % 2 == 0
            episode = FinishedEpisode(
                group.task,
                one,
                {"a.py": ""},
                {"a.py": f"x = {last}\n"},
                Grade(submitted=True, hidden=(good,)),
                Usage.of(one),
                workdir=self._run.workdir,
            )
            reward = combine(episode, signals)
            members.append(dataclasses.replace(one, reward=reward, solved=good))
        return Group(group.task, tuple(members))


@pytest.fixture(autouse=True)
def _paid(monkeypatch):
    monkeypatch.setattr(Run, "scheduler", lambda run, *_, **ways: Paid(run))
    # as processes do, each run reads what is on the disk
    monkeypatch.setattr(retraining_module, "scorer", Scorer)
    scorer_module.scorer.cache_clear()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, folder) -> Callable[[str], Path]:
    """Mode -> the workdir of a run, made when it is first asked for."""
    made: dict[str, Path] = {}

    def run(mode: str) -> Path:
        if mode not in made:
            made[mode] = tmp_path_factory.mktemp(mode) / "run"
            made[mode].mkdir()
            train(configured(folder, mode, BOUNDS[mode]), made[mode])
        return made[mode]

    return run


BOUNDS = {"one_step": 1, "sync": 0}


def versions(workdir: Path, folder: Path) -> dict[int, bytes]:
    """All bits of the versions that a run trained."""
    one = Scorer(folder, workdir / FOLDER)
    found = {}
    for version in checkpoint.steps(workdir / FOLDER):
        leaves = jax.tree.leaves(one.weights(version).model)
        found[version] = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
    return found


def weights(workdir: Path) -> list[str]:
    store = GroupStore(workdir / STORE)
    return [store.consumption(step)["weights"] for step in store.consumed()]


def notes(workdir: Path, step: int) -> list[dict]:
    return [
        trajectory.reward.notes["reward_model"]
        for record in GroupStore(workdir / STORE).read(step)
        for trajectory in record.group.trajectories
    ]


@pytest.mark.parametrize("mode", BOUNDS)
def test_episodes_are_paid_by_the_version_of_their_weights(runs, mode, folder):
    workdir = runs(mode)
    made = versions(workdir, folder)
    assert list(made) == [1, 2] and made[1] != made[2]
    for step in range(STEPS):
        (version,) = {note["version"] for note in notes(workdir, step)}
        assert version == max(0, step - BOUNDS[mode]) // 2
    rows = {row["step"]: row for row in read_metrics(workdir)}
    told = [step for step in rows if "reward_model/version" in rows[step]]
    assert told == [1, 3] and rows[3]["reward_model/version"] == 2
    assert rows[1]["reward_model/read"] == 16 and 0 <= rows[1]["reward_model/ece"] <= 1
    # the first version paid all of these itself
    assert rows[1]["reward_model/first_auc"] == pytest.approx(rows[1]["reward_model/auc"])
    assert rows[1]["reward_model/loss"] > 0


# at the checkpoint of a version, and a step later
@pytest.mark.parametrize("at", [2, 3])
def test_a_run_that_was_struck_ends_as_one_that_was_not(runs, tmp_path, folder, at):
    whole = runs("one_step")
    config = configured(folder)
    with pytest.MonkeyPatch.context() as patch:
        strike(patch, at, fail)
        with pytest.raises(OSError, match="struck"):
            train(config, tmp_path)
    train(config, tmp_path)
    assert weights(tmp_path) == weights(whole)
    assert versions(tmp_path, folder) == versions(whole, folder)
    assert deterministic(tmp_path) == deterministic(whole)


def test_versions_that_are_lost_are_made_again(runs, tmp_path, folder):
    workdir = shutil.copytree(runs("one_step"), tmp_path / "copy")
    there = versions(workdir, folder)
    shutil.rmtree(workdir / FOLDER)
    train(configured(folder), workdir)
    assert versions(workdir, folder) == there


def test_groups_of_a_refill_are_read_again_as_they_were_at_first(tmp_path, folder):
    """No reward differs, so each step is filled up with further groups."""
    config = configured(folder)
    (signal,) = config.reward.signals
    pack = dataclasses.replace(config.train.pack, drop_uninformative=True)
    filled = dataclasses.replace(config.train, refill=RefillConfig(2), pack=pack)
    reward = RewardConfig((dataclasses.replace(signal, weight=0.0),))
    config = dataclasses.replace(config, train=filled, reward=reward)
    workdir = tmp_path / "run"
    train(config, workdir)
    kinds = {item.kind for item in GroupStore(workdir / STORE).items(0)}
    there = versions(workdir, folder)
    shutil.rmtree(workdir / FOLDER)
    train(config, workdir)
    assert kinds == {"train", "refill"} and versions(workdir, folder) == there != {}


def test_training_on_the_record_gives_the_same_weights(runs, folder):
    found = replayed(runs("one_step"), config=configured(folder))
    assert sameness(found) == dict.fromkeys(range(STEPS), True)


# before the first version, and where there is no checkpoint
@pytest.mark.parametrize("step", [1, 3])
def test_a_fork_without_a_change_ends_as_the_run_itself(runs, tmp_path, folder, step):
    parent = runs("one_step")
    fork(parent, tmp_path / "fork", step, configured(folder))
    # what is trained from the step on is the fork's own
    assert checkpoint.steps(tmp_path / "fork" / FOLDER) == list(range(1, step // 2 + 1))
    train(configured(folder), tmp_path / "fork")
    assert weights(tmp_path / "fork") == weights(parent)
    assert versions(tmp_path / "fork", folder) == versions(parent, folder)


def test_a_fork_with_another_schedule_trains_versions_of_its_own(runs, tmp_path, folder):
    config = configured(folder, every=1, begins="first", fit=FIT | dict(kind="pairs"))
    fork(runs("one_step"), tmp_path / "fork", 3, config)
    train(config, tmp_path / "fork")
    assert checkpoint.steps(tmp_path / "fork" / FOLDER) == [1, 2, 3, 4, 5]
    assert {note["version"] for note in notes(tmp_path / "fork", 4)} == {3}


def test_a_version_of_other_groups_is_refused(runs, tmp_path, folder):
    workdir = shutil.copytree(runs("one_step"), tmp_path / "copy")
    store = GroupStore(workdir / STORE)
    found = retrained(configured(folder).reward)
    assert found is not None
    with Retraining(*found, 0, workdir, None, store) as one:
        assert one.after(0, store.read(0)) == {}
        assert one.after(1, store.read(1))["reward_model/version"] == 1
        with pytest.raises(StoreError, match="was made of other groups"):
            one.after(1, store.read(2))
        with pytest.raises(StoreError):
            one.after(9, [])  # the steps before are not on record


def test_a_run_retrains_one_model(folder):
    signal = dict(name="reward_model", folder=str(folder), retrain=dict(every=2))
    reward = build(RewardConfig, dict(signals=(signal, dict(signal, label="other"))))
    with pytest.raises(ConfigError, match="reward_model, other are all retrained"):
        retrained(reward)
    assert retrained(build(RewardConfig, dict(signals=("tests",)))) is None
