"""The store of a run gives its weights again, bit for bit, and a changed token shows.

The runs here train for real and sample with a stand-in (``tests.rl_code.recorded_runs``).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import signal
import threading
from pathlib import Path

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from launch import replay as replay_command
from rl_code import train as train_lib
from rl_code.act import act
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.checkpoint import CheckpointError
from rl_code.config.read_config import ConfigError
from rl_code.host.stop import Stopped
from rl_code.learner.learner import Learner
from rl_code.learner.update import init_state
from rl_code.metrics.values import read_metrics
from rl_code.recording.replay_training import same_bits
from rl_code.rollout.group_source import InActorThread
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import ACTORS, STORE, check
from rl_code.store import audit
from rl_code.store.claims import Claims
from rl_code.store.errors import StoreError
from rl_code.store.sealed import seal
from rl_code.store.steps import step_folder
from rl_code.store.store import GroupStore
from rl_code.train import train
from rl_code.weights import version_records
from rl_code.weights.local import LocalWeights
from rl_code.weights.transfer_subscriber import TransferSubscriber
from tests.rl_code.recorded_runs import (
    STEPS,
    change_token,
    deterministic,
    fail,
    make_config,
    replayed,
    sameness,
    strike,
)
from tests.rl_code.store.groups import group_path, out_of_shards, undeliver

pytestmark = pytest.mark.usefixtures("stand_in")


def final_state(workdir: Path):
    """The state in the newest checkpoint."""
    config = make_config("one_step", 1)
    with Run(config, workdir, "learner") as run, jax.set_mesh(run.mesh):
        restored = checkpoint.load(workdir, init_state(run.init_model(), config.train.optimizer))
    assert restored.step == STEPS
    return restored.state


# --- Replay ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_recorded_groups_give_the_recorded_weights(recorded):
    store = GroupStore(recorded / STORE)
    steps = replayed(recorded)
    assert sameness(steps) == dict.fromkeys(range(STEPS), True)
    assert [step.then for step in steps] == [
        store.consumption(step)["weights"] for step in range(STEPS)
    ]
    assert len({step.now for step in steps}) == STEPS  # every step moved the weights
    assert same_bits(steps[-1].state, final_state(recorded))
    report = audit.check(recorded / STORE, 1)
    assert report.problems == [] and report.consumed == STEPS and report.staleness_max == 1


@pytest.mark.parametrize(("start", "end"), [(2, None), (4, None), (2, 4), (0, 1)])
@pytest.mark.quick(first=1)
def test_a_replay_may_begin_at_a_checkpoint_and_end_early(recorded, start, end):
    expected = dict.fromkeys(range(start, STEPS if end is None else end), True)
    assert sameness(replayed(recorded, start, end)) == expected


def test_a_replay_cannot_begin_where_there_is_no_checkpoint(recorded):
    with pytest.raises(CheckpointError, match=r"no checkpoint of step=3"):
        replayed(recorded, 3)


def test_a_changed_token_shows_at_its_step(copy):
    change_token(copy, 3)
    assert sameness(replayed(copy)) == {0: True, 1: True, 2: True, 3: False, 4: False}
    (problem,) = audit.check(copy / STORE, 1).problems
    assert (
        "the group consumed is another one than the group that is there" in problem
        and "item (3, " in problem
    )


def repeated(workdir, monkeypatch, **given) -> bool:
    """What the command replay finds."""
    monkeypatch.setattr(replay_command, "use_devices", lambda *_: None)
    flags.FLAGS.mark_as_parsed()
    with flagsaver.as_parsed(**given):
        return replay_command.repeat_training(make_config("one_step", 1), workdir)


def test_a_replay_of_no_step_is_refused(recorded, monkeypatch):
    words = r"--start=4 --end=2: no finished step of .* lies there; on record are steps 0 to 4"
    with pytest.raises(ConfigError, match=words):
        repeated(recorded, monkeypatch, start="4", end="2")


def test_a_checkpoint_is_compared_whatever_a_step_before_it_did(copy, monkeypatch, capsys):
    out_of_shards(copy / STORE)
    consumption = GroupStore(copy / STORE).consumption(1)
    path = step_folder(copy / STORE, 1) / "consumed.json"
    path.write_bytes(seal({**consumption, "weights": "0" * 16}))
    assert not repeated(copy, monkeypatch)
    told = capsys.readouterr().out
    assert "step 1: weights 0000000000000000 then" in told
    assert f"the checkpoint of step {STEPS} equals the replayed state" in told
    assert "replayed: not equal" in told


def test_a_damaged_group_is_an_error(copy):
    out_of_shards(copy / STORE)
    path = group_path(copy / STORE, 2, 1)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"apart-1\.0\.0 from byte 0 on is damaged"):
        replayed(copy)


# --- The runs that are replayed -------------------------------------------------------------------


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("at", "blow", "raised", "saved"),
    [(3, fail, OSError, [2]), (1, fail, OSError, []), (2, ask_to_stop, Stopped, [2, 3])],
)
@pytest.mark.quick(first=1)
def test_an_interrupted_run_ends_as_one_that_was_not(
    recorded, tmp_path, monkeypatch, at, blow, raised, saved
):
    config = make_config("one_step", 1)
    strike(monkeypatch, at, blow)
    with pytest.raises(raised):
        train(config, tmp_path)
    assert checkpoint.steps(tmp_path) == saved
    train(config, tmp_path)
    assert same_bits(final_state(tmp_path), final_state(recorded))
    assert deterministic(tmp_path) == deterministic(recorded)
    assert audit.check(tmp_path / STORE, 1).problems == []
    assert all(sameness(replayed(tmp_path)).values())


def test_a_finished_run_goes_on_when_its_steps_are_raised(copy, monkeypatch):
    done = read_metrics(copy)
    assert done[0]["lengths/sampled_max"] >= done[0]["lengths/sampled_p50"] > 0
    played = []
    monkeypatch.setattr(train_lib, "evaluate", lambda *args: played.append(args[2:]))
    for steps in (STEPS, STEPS + 2):
        train(with_steps(make_config("one_step", 1), steps), copy)
        assert [row["step"] for row in read_metrics(copy)] == list(range(steps))
        assert played[-1] == ("after", steps)
    assert read_metrics(copy)[:STEPS] == done
    report = audit.check(copy / STORE, 1)
    assert report.consumed == STEPS + 2 and not report.problems
    with pytest.raises(
        ConfigError, match=rf"train\.steps = {STEPS}: .* trained for {STEPS + 2} steps already"
    ):
        train(make_config("one_step", 1), copy)


def test_a_start_that_fails_leaves_the_workdir_to_the_corrected_config(tmp_path, monkeypatch):
    config = make_config("sync", 0)

    def fails(*_):
        raise ConfigError("the mesh needs 4 devices")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "__init__", fails)
        with pytest.raises(ConfigError, match="needs 4 devices"):
            train(config, tmp_path / "run")
    other = dataclasses.replace(config, seed=7)
    check(tmp_path / "run", other)


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


@pytest.mark.parametrize(("mode", "k"), [("in_flight", 2), ("sync", 0)])
@pytest.mark.quick(first=1)
def test_every_mode_keeps_its_bound_and_can_be_replayed(tmp_path, monkeypatch, mode, k):
    config = make_config(mode, k)
    strike(monkeypatch, 3, fail)
    with pytest.raises(OSError, match="struck"):
        train(config, tmp_path)
    train(config, tmp_path)
    report = audit.check(tmp_path / STORE, k)
    assert report.problems == [] and report.consumed == STEPS and report.staleness_max <= k
    assert all(sameness(replayed(tmp_path, config=config)).values())
    for row in read_metrics(tmp_path):
        shares = [row.get(f"staleness/{age}", 0.0) for age in range(k + 1)]
        assert sum(shares) == pytest.approx(1.0) and 0.0 <= row["time/actor_idle"] <= 1.0


@pytest.mark.long
def test_in_two_phases_prompts_are_begun_before_groups_are_there_and_steps_are_those_of_one(
    recorded, tmp_path, monkeypatch
):
    config = make_config("one_step", 1)
    pack = dataclasses.replace(config.train.pack, prompt_slots=16)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, pack=pack))
    begin = Learner.begin
    wait = InActorThread.wait
    order = []

    def seen_begin(learner, *arguments):
        order.append("begin")
        return begin(learner, *arguments)

    def seen_wait(source, *arguments):
        order.append("wait")
        return wait(source, *arguments)

    monkeypatch.setattr(Learner, "begin", seen_begin)
    monkeypatch.setattr(InActorThread, "wait", seen_wait)
    train(config, tmp_path)
    assert order == ["begin", "wait"] * STEPS
    assert all(sameness(replayed(tmp_path, config=config)).values())
    for two, one in zip(read_metrics(tmp_path), read_metrics(recorded), strict=True):
        assert two["train/residual_mib"] > 0
        for name in ("train/loss", "train/grad_norm", "policy/entropy", "policy/mismatch_mean"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("role", ["all", "actor"])
def test_a_workdir_keeps_its_config_from_the_first_step_on(tmp_path, monkeypatch, role):
    config = make_config("one_step", 1)
    with monkeypatch.context() as patch:
        strike(patch, 1, fail)
        with pytest.raises(OSError, match="struck"):
            train(config, tmp_path)
    assert checkpoint.steps(tmp_path) == []
    changed = dataclasses.replace(
        config, seed=7, checkpoint=dataclasses.replace(config.checkpoint, keep=1)
    )
    start = functools.partial(act, name="actor-0") if role == "actor" else train
    with pytest.raises(
        ConfigError, match=r"holds a run of another config: seed = 0 there, 7 here\. Use another"
    ):
        start(changed, tmp_path)


def test_roles_apart_are_not_synchronous(tmp_path):
    config = make_config("sync", 0)
    for start in (functools.partial(train, role="learner"), functools.partial(act, name="actor-0")):
        with pytest.raises(
            ConfigError, match=r"asynchrony\.mode = 'sync'.* need 'one_step' or 'in_flight'"
        ):
            start(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_group_of_another_task_than_the_learners_is_refused(tmp_path, monkeypatch):
    made = train_lib.make_actor

    class Others:  # as if its file of tasks lacked the first
        def __init__(self, tasks):
            self._tasks = tasks

        def __getitem__(self, index):
            return self._tasks[index + 1]

    def make(run, *arguments):
        actor = made(run, *arguments)
        actor._tasks = Others(run.task_sets.training)
        return actor

    monkeypatch.setattr(train_lib, "make_actor", make)
    with pytest.raises(
        StoreError,
        match=r"actor/0 sampled '.*' for item \(0, \d\), which is '.*' here: do both read",
    ):
        train(make_config("one_step", 1), tmp_path)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("version", "kind"), [(1, "delta"), (0, "full")])
@pytest.mark.long
def test_a_flipped_bit_in_stored_weights_does_not_end_a_run(
    recorded, tmp_path, monkeypatch, version, kind
):
    config = make_config("one_step", 1)
    with monkeypatch.context() as patch:
        strike(patch, 2, fail)
        with pytest.raises(OSError, match="struck"):
            train(config, tmp_path)
    # Step 2 is sampled with version 1, which only storage has when the learner goes on at step 2.
    undeliver(tmp_path / STORE, 2)
    chunks = (version_records.data_folder(tmp_path / "weights", version) / kind).rglob("c.*")
    largest = max(chunks, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    train(config, tmp_path)
    assert same_bits(final_state(tmp_path), final_state(recorded))
    assert audit.check(tmp_path / STORE, 1).problems == []


@pytest.fixture
def version_missing(tmp_path, monkeypatch) -> Path:
    """A run interrupted as if version 3 had not reached storage, nor the groups of step 4, which it
    samples.
    """
    with monkeypatch.context() as patch:
        strike(patch, 3, fail)
        with pytest.raises(OSError, match="struck"):
            train(make_config("one_step", 1), tmp_path)
    shutil.rmtree(tmp_path / "weights")
    undeliver(tmp_path / STORE, 4)
    return tmp_path


def report_wait(patch: pytest.MonkeyPatch, subscriber: type) -> threading.Event:
    """Set when version 3 is waited for; the deadline of that wait is longer than a test's."""
    waiting = threading.Event()
    wait = subscriber.wait

    def seen(weights, **wanted):
        if wanted.get("exactly") == 3:
            waiting.set()
        return wait(weights, **wanted)

    patch.setattr(subscriber, "wait", seen)
    return waiting


@pytest.mark.timeout(120)
def test_a_learner_that_ends_does_not_wait_for_an_actor_that_waits_for_weights(
    version_missing, monkeypatch
):
    waiting = report_wait(monkeypatch, LocalWeights)

    def fail_when_it_waits() -> None:
        assert waiting.wait(60)
        fail()

    strike(monkeypatch, 2, fail_when_it_waits)
    with pytest.raises(OSError, match="struck"):
        train(make_config("one_step", 1), version_missing)
    assert "actor" not in {thread.name for thread in threading.enumerate()}


def test_an_actor_that_starts_when_the_last_step_is_consumed_has_nothing_to_do(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    act(make_config("one_step", 1), tmp_path, "late")
    assert read_metrics(tmp_path / ACTORS / "late") == []
    assert audit.check(tmp_path / STORE, 1).problems == []


@pytest.mark.timeout(120)
def test_an_actor_that_waits_for_weights_stops_when_it_is_asked_to(version_missing, monkeypatch):
    waiting = report_wait(monkeypatch, TransferSubscriber)

    def stop_when_it_waits() -> None:
        assert waiting.wait(60)
        ask_to_stop()

    threading.Thread(target=stop_when_it_waits).start()
    with pytest.raises(Stopped, match="actor-0 stopped; what it held may be taken over"):
        act(make_config("one_step", 1), version_missing, "actor-0")
    config = make_config("one_step", 1).asynchrony.work
    with Claims(GroupStore(version_missing / STORE, "actor-1"), config) as work:
        # at once, without the heartbeat's timeout
        assert {item.step for item in work.claim(100)} == {4}
