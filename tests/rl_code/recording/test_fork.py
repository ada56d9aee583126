"""A fork without a change is the run that it was forked from, and one with a change differs from
the step on; the parent stays as it is.

The runs here train for real and sample with a stand-in (``tests.rl_code.recorded_runs``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path

import jax
import pytest

from rl_code.checkpoint import checkpoint
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.learner.learner import Learner
from rl_code.learner.update import init_state
from rl_code.metrics.values import read_metrics
from rl_code.recording import fork as fork_lib
from rl_code.recording.fork import fork
from rl_code.recording.replay_training import same_bits
from rl_code.report import about
from rl_code.run import lineage
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store import audit
from rl_code.store.errors import ConsumedOtherwise
from rl_code.store.record_keeper import RecordConfig
from rl_code.store.store import GroupStore
from rl_code.tasks.curriculum import CurriculumConfig
from rl_code.train import train
from rl_code.weights.versions import OtherBits
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
MODES = {"one_step": 1, "sync": 0, "in_flight": 2}


@pytest.fixture(scope="module")
def parents(tmp_path_factory):
    """Mode -> the workdir of a run, made when it is first asked for."""
    made = {}

    def parent(mode: str) -> Path:
        if mode not in made:
            made[mode] = tmp_path_factory.mktemp(mode) / "parent"
            made[mode].mkdir()
            train(make_config(mode, MODES[mode]), made[mode])
        return made[mode]

    return parent


@pytest.fixture(params=MODES)
def mode(request) -> str:
    return request.param


def changed(config: RunConfig, **loss) -> RunConfig:
    """With another learning rate, which is the learner's alone."""
    optimizer = dataclasses.replace(config.train.optimizer, learning_rate=0.003)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, optimizer=optimizer))


def make_fork(parent: Path, workdir: Path, step: int, config: RunConfig, **how):
    return fork(parent, workdir, step, config, **how)


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def state_of(workdir: Path, config: RunConfig, step: int = STEPS):
    with Run(config, workdir, "learner") as run, jax.set_mesh(run.mesh):
        fresh = init_state(run.init_model(), config.train.optimizer)
        return checkpoint.load(workdir, fresh, step=step).state


def weights(workdir: Path) -> list[str]:
    store = GroupStore(workdir / STORE)
    return [store.consumption(step)["weights"] for step in store.consumed()]


# with a checkpoint, without one, before the first
@pytest.mark.parametrize(
    "mode, step",
    [
        ("one_step", 2),
        ("one_step", 3),
        ("one_step", 0),
        ("sync", 3),
        ("in_flight", 3),
    ],
)
@pytest.mark.quick(first=1)
def test_a_fork_without_a_change_ends_as_the_run_itself(parents, tmp_path, mode, step):
    parent = parents(mode)
    config = make_config(mode, MODES[mode])
    before = hashes(parent)
    made = make_fork(parent, tmp_path / "fork", step, config)
    assert made.shared.steps == step and made.shared.bytes > 0
    assert checkpoint.steps(tmp_path / "fork")[-1] == step
    train(config, tmp_path / "fork")
    assert same_bits(state_of(tmp_path / "fork", config), state_of(parent, config))
    assert weights(tmp_path / "fork") == weights(parent)
    assert deterministic(tmp_path / "fork") == deterministic(parent)
    assert audit.check(tmp_path / "fork" / STORE, MODES[mode]).problems == []
    assert hashes(parent) == before


@pytest.mark.long
def test_a_fork_with_another_loss_differs_from_the_step_on_only(parents, tmp_path, mode):
    parent = parents(mode)
    config = changed(make_config(mode, MODES[mode]))
    before = hashes(parent)
    made = make_fork(parent, tmp_path / "fork", 2, config)
    # what versions up to the fork's first sampled is what the fork would sample
    assert made.shared.beyond >= 2 * (1 + (mode == "one_step"))
    train(config, tmp_path / "fork")
    assert weights(tmp_path / "fork")[:2] == weights(parent)[:2]
    assert weights(tmp_path / "fork")[2] != weights(parent)[2]
    assert audit.check(tmp_path / "fork" / STORE, MODES[mode]).problems == []
    # steps before the fork are replayed with the config that they had
    steps = replayed(tmp_path / "fork", config=config)
    assert sameness(steps) == dict.fromkeys(range(STEPS), True)
    rows = deterministic(tmp_path / "fork")
    assert rows[:2] == deterministic(parent)[:2] and len(rows) == STEPS
    assert hashes(parent) == before
    facts = dict(about.runs([tmp_path / "fork"], ["fork"])[0]["facts"])
    assert facts["forked from"] == f"{parent} at step 2"
    assert facts["changed there"] == "train.optimizer.learning_rate: 0.01 -> 0.003"
    assert "bits change" not in facts


@pytest.mark.long
def test_a_fork_that_samples_anew_samples_what_the_run_sampled(parents, tmp_path):
    for mode in ("sync", "one_step"):  # in which a plan names the version
        config = make_config(mode, MODES[mode])
        made = make_fork(parents(mode), tmp_path / mode, 2, config, resample=True)
        assert made.shared.beyond == 0
        train(config, tmp_path / mode)
        assert weights(tmp_path / mode) == weights(parents(mode))


@pytest.mark.long
def test_a_fork_with_other_numbers_of_tasks_repeats_no_random_stream(parents, tmp_path):
    """The words of an item's key and the number of its group are its random stream."""
    config = make_config("one_step", 1)
    workdir = parents("one_step")
    for step, tasks, episodes in ((2, 1, 2), (4, 3, 4)):
        train_section = dataclasses.replace(config.train, tasks_per_step=tasks, group_size=episodes)
        config = dataclasses.replace(config, train=train_section)
        make_fork(workdir, tmp_path / f"fork{step}", step, config)
        workdir = tmp_path / f"fork{step}"
        train(config, workdir)
    store = GroupStore(workdir / STORE)
    items = [item for step in range(STEPS) for item in store.items(step)]
    assert [item.group for item in items] == list(range(9))  # 2, 2, 1, 1 and 3 groups
    assert len({(item.seed, item.group) for item in items}) == len(items)
    assert sameness(replayed(workdir, config=config)) == dict.fromkeys(range(STEPS), True)


@pytest.mark.long
def test_a_fork_of_a_fork_replays_each_part_with_its_own_config(parents, tmp_path):
    config = make_config("one_step", 1)
    other = changed(config)
    make_fork(parents("one_step"), tmp_path / "b", 2, other)
    train(other, tmp_path / "b")
    make_fork(tmp_path / "b", tmp_path / "c", 4, config)
    shutil.rmtree(tmp_path / "b")  # what it shared stays
    train(config, tmp_path / "c")
    assert sameness(replayed(tmp_path / "c", config=config)) == dict.fromkeys(range(STEPS), True)
    assert [entry.step for entry in lineage.read(tmp_path / "c")] == [2, 4]


@pytest.mark.long
def test_a_fork_of_a_run_with_a_curriculum_draws_what_the_run_drew(tmp_path):
    config = make_config("one_step", 1)
    section = dataclasses.replace(config.train, curriculum=CurriculumConfig(), tasks_per_step=3)
    config = dataclasses.replace(config, train=section)
    parent = tmp_path / "parent"
    train(config, parent)
    rows = read_metrics(parent)
    shares = {row["tasks/share_1"] for row in rows}
    assert len(shares) > 1  # they follow what was solved
    # what is sampled anew is planned again, from a checkpoint and from the beginning
    for step in (3, 1):
        workdir = tmp_path / f"fork{step}"
        make_fork(parent, workdir, step, config, resample=True)
        train(config, workdir)
        assert weights(workdir) == weights(parent)
    # and one that gives the curriculum up repeats no task
    plain = dataclasses.replace(config.train, curriculum=None)
    plain = dataclasses.replace(config, train=plain)
    make_fork(parent, tmp_path / "plain", 2, plain, resample=True)
    train(plain, tmp_path / "plain")
    assert sameness(replayed(tmp_path / "plain", config=plain)) == dict.fromkeys(range(STEPS), True)


@pytest.mark.long
def test_a_fork_of_a_run_without_its_oldest_steps_has_what_is_left(tmp_path):
    config = make_config("one_step", 1)
    config = dataclasses.replace(config, record=RecordConfig(shard_steps=2, keep=2))
    parent = tmp_path / "parent"
    train(config, parent)
    consumed = GroupStore(parent / STORE).consumed()
    assert consumed == [2, 3, 4]
    make_fork(parent, tmp_path / "fork", 3, config)
    shutil.rmtree(parent / STORE)
    train(config, tmp_path / "fork")
    assert same_bits(state_of(tmp_path / "fork", config), state_of(parent, config))
    assert sameness(replayed(tmp_path / "fork", 2, config=config)) == {2: True, 3: True, 4: True}
    with pytest.raises(ConfigError, match="can be forked at 2 to 5"):
        make_fork(tmp_path / "fork", tmp_path / "again", 1, config)


@pytest.mark.long
def test_a_fork_that_was_stopped_leaves_nothing_and_is_made_again(parents, tmp_path, monkeypatch):
    parent = parents("one_step")
    config = changed(make_config("one_step", 1))
    for name in ("share", "_share_rest", "_share_state", "_provide_version"):

        def stopped(*_, name=name):
            raise KeyboardInterrupt(name)

        with monkeypatch.context() as patch:
            patch.setattr(fork_lib, name, stopped)
            with pytest.raises(KeyboardInterrupt, match=name):
                make_fork(parent, tmp_path / "fork", 3, config)
        assert list(tmp_path.iterdir()) == []
    made = make_fork(parent, tmp_path / "fork", 3, config)
    assert not made.before and [path.name for path in tmp_path.iterdir()] == ["fork"]
    assert make_fork(parent, tmp_path / "fork", 3, config).before
    for how in ("other_bits", "resample"):
        with pytest.raises(ConfigError, match=f"holds a fork that was made without --{how}"):
            make_fork(parent, tmp_path / "fork", 3, config, **{how: True})
    train(config, tmp_path / "fork")
    assert audit.check(tmp_path / "fork" / STORE, 1).problems == []


@pytest.mark.parametrize(
    ("keys", "step", "words"),
    [
        ({"model.dtype": "bfloat16"}, 2, r"config\.model\.dtype cannot change in a fork"),
        ({"tokenizer.vocab_size": 310}, 2, r"config\.tokenizer\.vocab_size cannot change"),
        (
            {"train.optimizer.muon_learning_rate": 0.02},
            2,
            r"config\.train\.optimizer cannot change muon_learning_rate in a fork: the recorded",
        ),
        ({"train.steps": 1}, 2, r"config\.train\.steps = 1: the fork begins at step 2"),
        ({}, 9, r"--step=9: .* has done 5 steps, and can be forked at 0 to 5"),
    ],
)
@pytest.mark.quick(first=1)
def test_what_a_fork_cannot_change_is_said_in_one_line(parents, tmp_path, keys, step, words):
    settings = read_config.to_dict(make_config("one_step", 1))
    for key, value in keys.items():
        *sections, name = key.split(".")
        section = settings
        for part in sections:
            section = section[part]
        section[name] = value
    config = read_config.build(RunConfig, settings)
    with pytest.raises(ConfigError, match=words) as caught:
        make_fork(parents("one_step"), tmp_path / "fork", step, config)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_learner_that_does_not_repeat_its_updates_names_the_fork_that_goes_on(
    parents, tmp_path, monkeypatch
):
    config = make_config("one_step", 1)
    workdir = tmp_path / "run"
    expected = weights(parents("one_step"))[:2]  # made before the learner is changed
    with monkeypatch.context() as patch:
        strike(patch, 3, fail)
        with pytest.raises(OSError, match="struck"):
            train(config, workdir)
    call = Learner.__call__

    def other_bits(learner, *arguments):
        state, metrics = call(learner, *arguments)
        return jax.tree.map(lambda x: x + 1e-3 if x.ndim > 1 else x, state), metrics

    monkeypatch.setattr(Learner, "__call__", other_bits)
    with pytest.raises((OtherBits, ConsumedOtherwise)) as caught:
        train(config, workdir)
    command = str(caught.value).split("\n    ")[-1]
    fork_folder = f"{workdir}-2"
    assert command == (
        f"python -m launch.fork {workdir} --other_bits --step=2 --workdir={fork_folder}"
    )
    make_fork(workdir, Path(fork_folder), 2, config, other_bits=True)
    train(config, fork_folder)
    assert weights(Path(fork_folder))[:2] == expected
    assert len(weights(Path(fork_folder))) == STEPS
    facts = dict(about.runs([Path(fork_folder)], ["fork"])[0]["facts"])
    assert facts["bits change"].startswith("at step 2: ")
    assert [row["step"] for row in read_metrics(fork_folder)] == list(range(STEPS))
