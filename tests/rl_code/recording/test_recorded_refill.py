"""Runs whose steps are refilled resume, replay and fork exactly.

The runs here train for real and sample with a stand-in (``tests.rl_code.recorded_runs``).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rl_code.metrics.values import read_metrics
from rl_code.recording.fork import fork
from rl_code.run.config import RunConfig
from rl_code.run.workdir import STORE
from rl_code.schedule import Schedule
from rl_code.store import audit
from rl_code.store.store import GroupStore
from rl_code.tasks.curriculum import CurriculumConfig
from rl_code.tasks.refill import RefillConfig
from rl_code.train import train
from tests.rl_code import recorded_runs
from tests.rl_code.recorded_runs import STEPS, deterministic, fail, replayed, sameness, strike

pytestmark = [pytest.mark.usefixtures("stand_in"), pytest.mark.long]
MODES = {"one_step": 1, "sync": 0, "in_flight": 2}


def make_config(mode: str, **changes) -> RunConfig:
    """Groups of two episodes, every second of which teaches nothing."""
    config = recorded_runs.make_config(mode, MODES[mode])
    changes = dict(group_size=2, refill=RefillConfig(3)) | changes
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


@pytest.fixture(scope="module")
def parents(tmp_path_factory):
    """Mode -> the workdir of a run, made when it is first asked for."""
    made: dict[str, Path] = {}

    def parent(mode: str) -> Path:
        if mode not in made:
            made[mode] = tmp_path_factory.mktemp(mode) / "parent"
            made[mode].mkdir()
            train(make_config(mode), made[mode])
        return made[mode]

    return parent


def weights(workdir: Path) -> list[str]:
    store = GroupStore(workdir / STORE)
    return [store.consumption(step)["weights"] for step in store.consumed()]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_refilled_keeps_its_bound_and_can_be_replayed(parents, mode):
    workdir, config = parents(mode), make_config(mode)
    report = audit.check(workdir / STORE, MODES[mode])
    assert report.problems == [] and report.consumed == STEPS
    assert report.staleness_max <= MODES[mode]
    assert all(sameness(replayed(workdir, config=config)).values())
    rows = read_metrics(workdir)
    assert sum(row["tasks/refills"] for row in rows) > 0
    tasks = config.train.tasks_per_step
    for row in rows:
        mixed = row["tasks/drawn"] - row["tasks/thrown_away"]
        assert mixed == tasks or row["tasks/drawn"] == 3 * tasks
        assert row["train/trajectories"] == mixed * config.train.group_size


@pytest.mark.parametrize("at", [1, 3])
def test_a_refilled_run_that_was_interrupted_ends_as_one_that_was_not(
    parents, tmp_path, monkeypatch, at
):
    config = make_config("one_step")
    with monkeypatch.context() as patch:
        strike(patch, at, fail)
        with pytest.raises(OSError, match="struck"):
            train(config, tmp_path)
        train(config, tmp_path)
    assert weights(tmp_path) == weights(parents("one_step"))
    assert deterministic(tmp_path) == deterministic(parents("one_step"))
    assert audit.check(tmp_path / STORE, 1).problems == []


def test_a_run_that_died_when_it_had_planned_a_refill_ends_as_one_that_did_not(
    parents, tmp_path, monkeypatch
):
    config = make_config("one_step")
    announce = Schedule._announce
    done = []

    def dying(schedule, items):
        announce(schedule, items)
        if items[0].kind == "refill" and items[0].step > 0 and not done:
            done.append(items)
            fail()

    with monkeypatch.context() as patch:
        patch.setattr(Schedule, "_announce", dying)
        with pytest.raises(OSError, match="struck"):
            train(config, tmp_path)
    assert done
    train(config, tmp_path)
    assert weights(tmp_path) == weights(parents("one_step"))
    assert audit.check(tmp_path / STORE, 1).problems == []


@pytest.mark.parametrize(("mode", "step"), [("one_step", 3), ("sync", 2), ("in_flight", 2)])
def test_a_fork_of_a_refilled_run_without_a_change_ends_as_the_run_itself(
    parents, tmp_path, mode, step
):
    config = make_config(mode)
    fork(parents(mode), tmp_path / "fork", step, config)
    train(config, tmp_path / "fork")
    assert weights(tmp_path / "fork") == weights(parents(mode))


@pytest.mark.parametrize("step", [2, 3])
def test_a_fork_that_learns_otherwise_refills_by_its_own_groups(parents, tmp_path, step):
    config = make_config("one_step")
    optimizer = dataclasses.replace(config.train.optimizer, learning_rate=0.003)
    config = make_config("one_step", optimizer=optimizer)
    fork(parents("one_step"), tmp_path / "fork", step, config)
    train(config, tmp_path / "fork")
    assert weights(tmp_path / "fork")[:step] == weights(parents("one_step"))[:step]
    assert audit.check(tmp_path / "fork" / STORE, 1).problems == []
    # Without refills the fork draws the tasks that are planned anyway.
    plain = make_config("one_step", refill=None)
    fork(parents("one_step"), tmp_path / "plain", step, plain)
    train(plain, tmp_path / "plain")
    stores = [GroupStore(path / STORE) for path in (parents("one_step"), tmp_path / "plain")]
    planned = [
        [item.task for item in store.items(step) if item.kind == "train"] for store in stores
    ]
    assert planned[0] == planned[1]


def test_a_curriculum_that_is_refilled_can_be_forked_where_nothing_was_saved(tmp_path):
    config = make_config("one_step", curriculum=CurriculumConfig())
    parent = tmp_path / "parent"
    parent.mkdir()
    train(config, parent)
    fork(parent, tmp_path / "fork", 3, config)
    train(config, tmp_path / "fork")
    assert weights(tmp_path / "fork") == weights(parent)
