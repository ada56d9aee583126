"""Runs whose steps are refilled resume, replay and fork exactly.

The runs here train for real and sample with a stand-in (``tests.rl_code.recorded_runs``).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.metrics.values import read_metrics
from rl_code.recording.fork import fork
from rl_code.run.config import RunConfig
from rl_code.run.workdir import STORE
from rl_code.store import audit
from rl_code.store.steps import Item
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


def batches(workdir: Path) -> list[list[tuple[int, int, str]]]:
    """The groups of each step, in order: number, task, and the kind of the item."""
    store = GroupStore(workdir / STORE)
    steps = [store.items(step) for step in store.consumed()]
    return [[(item.group, item.task, item.kind) for item in items] for items in steps]


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


def test_a_refilled_run_that_was_interrupted_ends_as_one_that_was_not(
    parents, tmp_path, monkeypatch
):
    """Before its first checkpoint; below it dies behind one."""
    config = make_config("one_step")
    with monkeypatch.context() as patch:
        strike(patch, 1, fail)
        with pytest.raises(OSError, match="struck"):
            train(config, tmp_path)
        train(config, tmp_path)
    assert weights(tmp_path) == weights(parents("one_step"))
    assert deterministic(tmp_path) == deterministic(parents("one_step"))
    assert audit.check(tmp_path / STORE, 1).problems == []


# The steps in which a run dies, of which the first is refilled four times, and the checkpoint between
# them.
DEADLY = (1, 2)
CHECKPOINT = 2


def is_of_a_refill(plan_or_item) -> bool:
    """True for an item of a refill of these steps, and for a part of a plan that is one."""
    items = [plan_or_item] if isinstance(plan_or_item, Item) else plan_or_item
    return items[0].kind == "refill" and items[0].step in DEADLY


def kill_everywhere(patch: pytest.MonkeyPatch) -> list[str]:
    """Makes a run fail before and after every write of a refill, and of the end of a step, at each
    of these places once; returns the places, as they are reached. Of two steps, since each death
    is a start.
    """
    reached: list[str] = []

    def killing(owner, name, wanted):
        write = getattr(owner, name)

        def killed(self, what, *rest, **named):
            def die(when: str) -> None:
                place = f"{when} {name} {what if isinstance(what, int) else where(what)}"
                if wanted(what) and place not in reached:
                    reached.append(place)
                    fail()

            die("before")
            out = write(self, what, *rest, **named)
            die("after")
            return out

        patch.setattr(owner, name, killed)

    def where(what) -> str:
        return str(what if isinstance(what, Item) else what[0])

    killing(GroupStore, "plan", is_of_a_refill)
    killing(GroupStore, "deliver", is_of_a_refill)
    killing(GroupStore, "consume", lambda step: step in DEADLY)
    killing(Checkpoints, "save", lambda step: step == CHECKPOINT)
    return reached


@pytest.mark.parametrize("mode", ["one_step", "sync"])
def test_a_run_that_dies_at_every_write_of_a_refill_ends_as_one_that_did_not(
    parents, tmp_path, monkeypatch, mode
):
    config = make_config(mode)
    with monkeypatch.context() as patch:
        reached = kill_everywhere(patch)
        deaths = 0
        while True:
            try:
                train(config, tmp_path)
                break
            except OSError as error:
                assert "struck" in str(error)
                deaths += 1
    # The learner may write once more before it sees that the actor's thread has died.
    assert len(reached) / 2 < deaths <= len(reached)
    assert mode != "sync" or deaths == len(reached)
    for name in ("plan", "deliver"):
        assert any(f"after {name}" in place for place in reached), reached
    assert weights(tmp_path) == weights(parents(mode))
    assert batches(tmp_path) == batches(parents(mode))
    assert deterministic(tmp_path) == deterministic(parents(mode))
    report = audit.check(tmp_path / STORE, MODES[mode])
    assert report.problems == [] and report.consumed == STEPS
    assert report.staleness_max <= MODES[mode]


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
