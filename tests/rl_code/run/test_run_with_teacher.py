"""Whole runs with a teacher: resumed, replayed and forked bit for bit, and what is refused.

The runs here train for real and sample with a stand-in (``tests.rl_code.recorded_runs``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

from configs import quickstart
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.checkpoint import Checkpoints
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError, build
from rl_code.learner.distillation import TeacherConfig
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.teacher import first_state
from rl_code.learner.value_config import ValueConfig
from rl_code.metrics.values import read_metrics
from rl_code.recording.fork import fork
from rl_code.run import dry_run, teaching
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.teacher import reads_test_errors
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from rl_code.train import train
from rl_code.types import Task
from tests.rl_code.learner.conftest import make_toy
from tests.rl_code.recorded_runs import (
    STEPS,
    deterministic,
    fail,
    make_config,
    replayed,
    sameness,
    strike,
    with_stand_in,
)

# The stand-in's prompts are shorter than those that feedback is put into.
ROOM = dict(feedback_tokens=40, slots=320)
AVERAGE = dict(average=0.5, feedback=Named("reference"), divergence=Named("top_k", {"k": 4}))
# A value function on the policy's backbone, which rests in the first step.
VALUE = dict(
    value=ValueConfig(OptimizerConfig(learning_rate=1e-2), pretrain_steps=1),
    advantage=Named("gae"),
)
OWN = dict(feedback=Named("solved_sibling"), divergence=Named("full"))


@pytest.fixture(scope="module")
def stand_in():
    with with_stand_in():
        yield


@pytest.fixture(scope="module")
def plain(stand_in, tmp_path_factory):
    """The workdir of a run without a teacher."""
    workdir = tmp_path_factory.mktemp("plain")
    train(config_of(None), workdir)
    return workdir


def config_of(teacher, **changes) -> RunConfig:
    """The config of the recorded runs with a teacher of these settings."""
    config = make_config("one_step", 1)
    pack = dataclasses.replace(config.train.pack, drop_uninformative=False)
    made = None if teacher is None else TeacherConfig(**ROOM | teacher)
    learned = dataclasses.replace(config.train, pack=pack, teacher=made, **changes)
    return dataclasses.replace(config, train=learned)


def weights(workdir) -> list[str]:
    store = GroupStore(workdir / STORE)
    return [store.consumption(step)["weights"] for step in store.consumed()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("teacher", "changes"),
    [(OWN, {}), (AVERAGE, VALUE)],
    ids=["own", "average, beside values"],
)
def test_a_run_with_a_teacher_is_resumed_and_replayed_bit_for_bit(
    stand_in, tmp_path, teacher, changes
):
    config = config_of(teacher, **changes)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config, whole)
    with pytest.MonkeyPatch.context() as patch:
        strike(patch, 3, fail)
        with pytest.raises(OSError, match="struck"):
            train(config, parts)
    train(config, parts)
    assert weights(whole) == weights(parts)
    assert deterministic(whole) == deterministic(parts)
    assert 0.0 < read_metrics(whole)[-1]["teacher/share"] <= 1.0
    for start in (0, 2):
        expected = dict.fromkeys(range(start, STEPS), True)
        assert sameness(replayed(parts, start, config=config)) == expected
    names = checkpoint.record_of(whole).arrays
    assert any(name.startswith("average.") for name in names) == ("average" in teacher)
    assert any(name.startswith("value.") for name in names) == ("value" in changes)


@pytest.mark.long
def test_a_fork_begins_a_moving_average_and_another_leaves_it_out(plain, tmp_path):
    config = config_of(AVERAGE)
    begun = tmp_path / "begun"
    fork(plain, begun, 2, config)
    train(config, begun)
    assert weights(begun)[:2] == weights(plain)[:2] and weights(begun)[2] != weights(plain)[2]
    expected = dict.fromkeys(range(STEPS), True)
    assert sameness(replayed(begun, config=config)) == expected
    without = tmp_path / "without"
    fork(begun, without, 4, config_of(None))
    train(config_of(None), without)
    assert weights(without)[:4] == weights(begun)[:4] and weights(without)[4] != weights(begun)[4]
    assert sameness(replayed(without, config=config_of(None))) == expected


@pytest.mark.long
def test_a_checkpoint_teaches_a_run(plain, tmp_path):
    config = config_of(dict(weights=f"{plain}@{STEPS}", rewards=0.0))
    workdir = tmp_path / "taught"
    train(config, workdir)
    rows = read_metrics(workdir)
    assert [row["teacher/share"] for row in rows] == [1.0] * STEPS
    assert min(row["teacher/divergence"] for row in rows) > 0.0
    assert weights(workdir) != weights(plain)
    assert sameness(replayed(workdir, config=config)) == dict.fromkeys(range(STEPS), True)


@pytest.mark.long
def test_a_dry_run_tells_what_a_teacher_takes(stand_in, tmp_path, monkeypatch):
    """What compiling adds is the same for any program."""

    def traced(name, trace):
        trace()
        return dry_run.Program(name, 0.0, 1)

    monkeypatch.setattr(dry_run, "_program", traced)
    with Run(config_of(AVERAGE), tmp_path) as run:
        found = dry_run.plan(run)
    names = {memory.name: memory.bytes for memory in found.memory if memory.where == "learner"}
    assert names["teacher's words"] > 0
    assert names["moving average"] == names["weights"]
    assert "teacher" in [program.name for program in found.programs]


@pytest.mark.long
def test_what_does_not_go_with_a_run_is_refused_before_it_starts(plain, tmp_path):
    with pytest.raises(ConfigError, match="k=400 must be less than the"):
        check(config_of(AVERAGE | dict(divergence=Named("top_k", {"k": 400}))), tmp_path)
    with pytest.raises(ConfigError, match=r"config\.train\.teacher\.weights = '.*has checkpoints"):
        check(config_of(dict(weights=f"{plain}@77")), tmp_path)
    with pytest.raises(ConfigError, match=r"name a step with @, one of \[2, 4, 5\]"):
        check(config_of(dict(weights=str(plain))), tmp_path)
    other = config_of(dict(weights=f"{plain}@{STEPS}"))
    tokenizer = dataclasses.replace(other.tokenizer, vocab_size=290)
    other = dataclasses.replace(other, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="its tokenizer is not that of the run"):
        check(other, tmp_path)


def check(config, workdir):
    with contextlib.closing(Run(config, workdir, "learner")):
        pass


# --- Without a run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.pack.drop_uninformative": True}, "drops groups of equal rewards"),
        ({"documents": {}}, "documents have other places behind it"),
        ({"harness": "mini_swe_agent"}, "writes its prompts by itself"),
        ({"train.teacher.average": 2.0}, r"config\.train\.teacher: average=2\.0 must be between"),
        ({"train.teacher.divergence": "kl"}, r"config\.train\.teacher\.divergence = 'kl'"),
    ],
)
def test_what_a_teacher_cannot_be_with_is_refused(changes, message):
    settings = quickstart.get_config("smoke")
    with settings.unlocked():
        settings.train.pack.drop_uninformative = False
        settings.train.teacher = dict(feedback="hint")
        settings.update_from_flattened_dict(changes)
        for key in ("documents", "harness"):
            if key in changes:
                settings[key] = changes[key]
    with pytest.raises(ConfigError, match=message):
        build(RunConfig, settings)


def test_rows_of_a_teacher_have_room_for_feedback():
    settings = quickstart.get_config("smoke")
    with settings.unlocked():
        settings.train.pack.update(drop_uninformative=False, slots=500)
        settings.train.teacher = dict(feedback="hint", feedback_tokens=100)
    config = build(RunConfig, settings)
    assert config.train.teacher.slots == 600  # sized for one trajectory
    with settings.unlocked():
        settings.train.pack.targets = 3 * 288
        settings.train.teacher.feedback = None
        settings.train.teacher.average = 0.9
    assert build(RunConfig, settings).train.teacher.slots == 500
    with settings.unlocked():
        settings.train.teacher.feedback = "hint"
    assert build(RunConfig, settings).train.teacher.slots == 800


@pytest.mark.parametrize("saved", [AVERAGE, None], ids=["with", "without"])
@pytest.mark.parametrize("wanted", [AVERAGE, None], ids=["with", "without"])
def test_a_checkpoint_is_read_with_and_without_an_average(tmp_path, saved, wanted):
    def fresh(teacher, scale):
        model = jax.tree.map(lambda x: scale * x, make_toy())
        state = first_state(config_of(teacher).train, model)
        if state.average is not None:
            average = jax.tree.map(lambda x: 2.0 * x, state.average)
            state = dataclasses.replace(state, average=average)
        return state

    state = fresh(saved, 1.0)
    with Checkpoints(tmp_path, {}, keep=1) as checkpoints:
        checkpoints.save(3, state, {})
    with Checkpoints(tmp_path, {}, keep=1) as checkpoints:
        train = config_of(wanted).train
        found = teaching.restored(train, fresh(wanted, 0.0), tmp_path, checkpoints.restore)
    assert found.step == 3
    np.testing.assert_array_equal(found.state.model.table, state.model.table)
    if wanted is None:
        assert found.state.average is None
    else:
        # one that is missing begins as the weights that were read
        expected = state.model if saved is None else state.average
        np.testing.assert_array_equal(found.state.average.table, expected.table)
    # the state that was begun with is none that was read
    load = functools.partial(checkpoint.load, tmp_path / "none")
    assert teaching.restored(train, fresh(wanted, 0.0), tmp_path / "none", load) is None


TASK = Task("t", ({"role": "user", "content": "mend"},))


def encode(task):
    return [ord(letter) for letter in task.messages[0]["content"]]


def test_feedback_is_cut_to_its_room():
    short = teaching.prompt_with(encode, TASK, "hint", 6)
    assert "".join(map(chr, short)) == "mend\n\nhint"
    long = "".join(map(chr, teaching.prompt_with(encode, TASK, "a" * 500 + "b" * 500, 80)))
    assert len(long) <= 4 + 80
    assert long.startswith("mend\n\naa") and long.endswith("b") and "characters cut" in long
    # not even the note that something was cut
    assert teaching.prompt_with(encode, TASK, "a" * 500, 2) is None


def test_a_protocol_that_leaves_out_messages_is_refused():
    with pytest.raises(ConfigError, match="writes nothing of a task's messages"):
        teaching.prompt_with(lambda task: [1, 2, 3], TASK, "hint", 6)


def test_episodes_keep_what_tests_said_only_where_a_teacher_reads_it():
    assert not reads_test_errors(config_of(None).train)
    assert not reads_test_errors(config_of(OWN).train)
    assert reads_test_errors(config_of(dict(feedback=Named("failed_tests"))).train)
