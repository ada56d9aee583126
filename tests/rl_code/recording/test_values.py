"""Runs with a value function: resumed, replayed and forked, they come to the same bits; and a fork
may add one.

The runs here train for real and sample with a stand-in (``tests.rl_code.recorded_runs``).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import pytest

from rl_code.checkpoint import checkpoint
from rl_code.config.named import Named
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.update import init_state
from rl_code.learner.value_config import ValueConfig
from rl_code.metrics.values import read_metrics
from rl_code.recording.fork import fork
from rl_code.recording.replay_training import same_bits
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store import audit
from rl_code.store.store import GroupStore
from rl_code.train import train
from tests.rl_code.recorded_runs import (
    STEPS,
    deterministic,
    fail,
    make_config,
    replayed,
    sameness,
    strike,
)

pytestmark = pytest.mark.usefixtures("stand_in")
GAE = Named("gae", {"lam": 0.9})
# A checkpoint is made every 2 steps: the first one in the middle of pretraining.
PRETRAIN = 3


def config_of(backbone: str | None, pretrain: int = PRETRAIN) -> RunConfig:
    """A run with a value function, or without one but otherwise alike."""
    config = make_config("one_step", 1)
    pack = dataclasses.replace(config.train.pack, drop_uninformative=False)
    changes: dict = {"pack": pack}
    if backbone is not None:
        optimizer = OptimizerConfig(learning_rate=0.01)
        value = ValueConfig(optimizer, backbone, pretrain_steps=pretrain, pretrain_epochs=2)
        changes |= {"advantage": GAE, "value": value}
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


@pytest.fixture(scope="module", params=["shared", "separate"])
def backbone(request) -> str:
    return request.param


# A test's own backbones instead.
INDIRECT = dict(indirect=["backbone"], scope="module")


@pytest.fixture(scope="module")
def whole(stand_in, backbone, tmp_path_factory) -> Path:
    """The workdir of a run that was not interrupted."""
    workdir = tmp_path_factory.mktemp(backbone)
    train(config_of(backbone), workdir)
    return workdir


def state_of(workdir: Path, config: RunConfig, step: int = STEPS):
    """The state in a checkpoint."""
    with Run(config, workdir, "learner") as run, jax.set_mesh(run.mesh):
        fresh = init_state(run.init_model(), config.train.optimizer, config.train.value)
        return checkpoint.load(workdir, fresh, step=step).state


def weights(workdir: Path) -> list[str]:
    store = GroupStore(workdir / STORE)
    return [store.consumption(step)["weights"] for step in store.consumed()]


@pytest.mark.long
def test_pretraining_keeps_the_policy_and_the_record_replays(whole, backbone):
    config = config_of(backbone)
    made = weights(whole)
    # the versions of pretraining are the first one
    assert len(set(made[:PRETRAIN])) == 1 and len(set(made)) == STEPS - PRETRAIN + 1
    steps = replayed(whole, config=config)
    assert sameness(steps) == dict.fromkeys(range(STEPS), True)
    assert same_bits(steps[-1].state, state_of(whole, config))
    assert sameness(replayed(whole, 2, config=config)) == dict.fromkeys(range(2, STEPS), True)
    assert audit.check(whole / STORE, 1).problems == []
    rows = read_metrics(whole)
    assert all("value/explained_variance" in row for row in rows)
    assert ["policy/entropy" in row for row in rows] == [False] * PRETRAIN + [True] * 2


# the struck step, and the checkpoint from which it is made again: in the middle of pretraining, and
# after it
@pytest.mark.parametrize("backbone, at, saved", [("shared", 2, 2), ("separate", 4, 4)], **INDIRECT)
@pytest.mark.long
def test_an_interrupted_run_ends_as_one_that_was_not(
    whole, backbone, at, saved, tmp_path, monkeypatch
):
    config = config_of(backbone)
    strike(monkeypatch, at, fail)
    with pytest.raises(OSError):
        train(config, tmp_path)
    assert checkpoint.steps(tmp_path)[-1] == saved
    assert (state_of(tmp_path, config, saved).value.updates < 2 * PRETRAIN) == (at < PRETRAIN)
    train(config, tmp_path)
    assert same_bits(state_of(tmp_path, config), state_of(whole, config))
    assert deterministic(tmp_path) == deterministic(whole)


# from where there is no checkpoint
@pytest.mark.parametrize("backbone, step", [("separate", 3)], **INDIRECT)
@pytest.mark.long
def test_a_fork_without_a_change_ends_as_the_run_itself(whole, backbone, step, tmp_path):
    config = config_of(backbone)
    fork(whole, tmp_path / "fork", step, config)
    train(config, tmp_path / "fork")
    assert same_bits(state_of(tmp_path / "fork", config), state_of(whole, config))
    assert weights(tmp_path / "fork") == weights(whole)


@pytest.mark.long
@pytest.mark.parametrize("backbone", ["separate"], **INDIRECT)
def test_a_fork_may_replace_the_value_function(whole, backbone, tmp_path):
    config = config_of("shared", pretrain=1)
    there = tmp_path / "fork"
    fork(whole, there, 3, config)
    train(config, there)
    made = weights(there)
    # the new one is pretrained first; the old one would not have been
    assert made[:4] == [*weights(whole)[:3], weights(whole)[2]]
    assert weights(whole)[3] != weights(whole)[2]
    assert state_of(there, config).value.updates == 2 + 1
    assert all(sameness(replayed(there, config=config)).values())


@pytest.fixture(scope="module")
def without(stand_in, tmp_path_factory) -> Path:
    """The workdir of a run without values."""
    workdir = tmp_path_factory.mktemp("without")
    train(config_of(None), workdir)
    return workdir


# with a checkpoint, and without one
@pytest.mark.long
@pytest.mark.parametrize("backbone, step", [("shared", 2), ("separate", 3)], **INDIRECT)
def test_a_fork_may_add_a_value_function_and_drop_it(without, backbone, step, tmp_path):
    config = config_of(backbone, pretrain=2)
    there = tmp_path / "fork"
    fork(without, there, step, config)
    train(config, there)
    made = weights(there)
    assert made[:step] == weights(without)[:step]
    # it is pretrained first, on what the policy of the fork's step samples
    before = [made[step - 1]] if step else []
    assert len({*before, *made[step : step + 2]}) == 1
    assert made[-1] != weights(without)[-1]
    assert all(sameness(replayed(there, config=config)).values())
    assert audit.check(there / STORE, 1).problems == []
    if step == 2:
        again = tmp_path / "again"
        fork(there, again, 4, config_of(None))
        train(config_of(None), again)
        assert weights(again)[:4] == made[:4]
        assert state_of(again, config_of(None)).value is None
        assert all(sameness(replayed(again, config=config_of(None))).values())
