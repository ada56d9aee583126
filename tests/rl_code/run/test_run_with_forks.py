"""Whole runs whose episodes are forked at turn borders: recorded once, resumed, replayed, and read by
a process reward model.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from configs import quickstart
from models.families import PRESETS
from rl_code.config.read_config import ConfigError, build
from rl_code.metrics.values import read_metrics
from rl_code.recording import process_training
from rl_code.recording.process_training import ProcessModelConfig
from rl_code.recording.replay_training import replay
from rl_code.recording.replay_trajectories import find, play_again
from rl_code.rewards import process_model
from rl_code.run.config import RunConfig
from rl_code.run.run import Run
from rl_code.run.workdir import STORE
from rl_code.store import audit
from rl_code.store.store import GroupStore
from rl_code.train import train
from tests.models.small import narrow_preset
from tests.rl_code.run.lookups import constant_rate

pytestmark = pytest.mark.usefixtures("traced_once")

FORKS = dict(continuations=2, borders=2)
STEPS = 3
LEARNED = dict(advantage="monte_carlo", continuations=True)


def settings_of(steps=2, mode="one_step", forks=FORKS, **train_keys):
    settings = quickstart.get_config("smoke")
    settings.suites = ()
    settings.sft = None
    settings.mesh.data = 1
    settings.tokenizer.update(texts=20, vocab_size=300)
    settings.limits.update(turns=3, tokens=256, turn_tokens=16)
    settings.rollout.engine.update(slots=4, prompt_length=160, prefill_tokens=64, decode_steps=4)
    settings.train.update(steps=steps, tasks_per_step=2, group_size=2, micro_batches=1)
    constant_rate(settings)
    settings.train.pack.update(rows=6, slots=512, targets=256, drop_uninformative=False)
    settings.train.loss.update(entropy_coef=0.1)
    settings.checkpoint.update(every=2)
    with settings.unlocked():
        settings.asynchrony = dict(mode=mode)
        settings.rollout.forks = forks
        settings.train.update(**train_keys)
    return settings


def config_of(*arguments, **keys) -> RunConfig:
    return build(RunConfig, settings_of(*arguments, **keys))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset(num_kv_heads=1))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The workdir of a run that trains on its continuations, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", narrow_preset(num_kv_heads=1))
        workdir = tmp_path_factory.mktemp("forked")
        train(config_of(STEPS, **LEARNED), workdir)
    return workdir


@pytest.mark.long
def test_every_group_has_its_continuations_once(recorded):
    report = audit.check(recorded / STORE, 1)
    assert report.problems == [] and report.consumed == STEPS
    store = GroupStore(recorded / STORE)
    for step in range(STEPS):
        for record in store.read(step):
            group = record.group
            assert [t.index for t in group.trajectories] == [0, 1]
            for index, main in enumerate(group.trajectories):
                turns = sum(turn.role == "assistant" for turn in main.turns)
                borders = group.parted_from(index)
                assert [fork.turn for fork, _ in borders] == list(range(1, min(turns, 3)))
                for fork, continuations in borders:
                    (length,) = fork.lengths
                    assert len(continuations) == 2
                    for one in continuations:
                        assert np.array_equal(one.tokens[:length], main.tokens[:length])
                        assert one.own_sampled.any() and one.num_tokens <= 256
    rows = read_metrics(recorded)
    for row in rows:
        assert row["forks/continuations"] == 2 * row["forks/borders"] > 0
        assert row["forks/sampled_tokens"] > 0
        if row["rollout/staleness_max"] == 0:
            assert row["policy/mismatch_max"] < 1e-3
    generated = sum(row["engine/generated_tokens"] for row in rows)
    told = sum(row["rollout/sampled_tokens"] + row["forks/sampled_tokens"] for row in rows)
    assert told == generated


@pytest.mark.long
@pytest.mark.parametrize("mode", ["one_step", "in_flight"])
def test_continuations_are_sampled_again_and_training_is_replayed(recorded, tmp_path, mode):
    workdir, config = recorded, config_of(STEPS, mode=mode, **LEARNED)
    if mode == "in_flight":
        workdir = tmp_path
        train(config, workdir)
    for step in (1, 2):
        found = find(workdir, step, "1")
        places = range(len(found.record.group.all))
        again = list(play_again(config, workdir, found, places))
        assert [one.difference for one in again] == [None] * len(places)
        assert any(one.now.fork for one in again)
        assert [one.now.fork for one in again] == [one.recorded.fork for one in again]
    with Run(config, workdir, "learner") as run, jax.set_mesh(run.mesh):
        assert [step.same for step in replay(run)] == [True] * STEPS


@pytest.mark.long
def test_a_run_that_was_stopped_ends_with_the_same_weights(recorded, tmp_path):
    train(config_of(2, **LEARNED), tmp_path)
    train(config_of(STEPS, **LEARNED), tmp_path)
    stores = [GroupStore(folder / STORE) for folder in (recorded, tmp_path)]
    sums = [[store.consumption(step)["weights"] for step in range(STEPS)] for store in stores]
    assert sums[0] == sums[1]


@pytest.mark.long
def test_a_process_reward_model_is_trained_resumed_and_pays(recorded, tmp_path):
    def settings(steps):
        return build(
            ProcessModelConfig,
            dict(
                runs=(str(recorded),),
                backbone=f"{recorded}@{STEPS}",
                optimizer=dict(learning_rate=1e-2),
                steps=steps,
                held_out=0.5,
                rows=4,
                checkpoint_every=2,
            ),
        )

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    judged = process_training.train(settings(4), whole)
    for steps in (2, 4):
        process_training.train(settings(steps), parts)
    assert judged["borders"]["count"] + judged["ends"]["count"] > 0
    assert set(process_model.read(whole).judged) == {"2", "4"}
    trajectory = GroupStore(recorded / STORE).read(0)[0].group.trajectories[0]
    given = (
        trajectory.contexts[0].tokens,
        [trajectory.prompt_length - 1, len(trajectory.tokens) - 1],
    )
    scores = [process_model.Scorer(folder).scores(*given) for folder in (whole, parts)]
    assert scores[0] == scores[1] and all(0 < score < 1 for score in scores[0])
    assert process_model.Scorer(whole, 2).scores(*given) != scores[0]

    def paid_by(step=4, **keys):
        paid = settings_of(2, forks=None)
        with paid.unlocked():
            signal = dict(name="process", weights=f"{whole}@{step}", form="difference")
            paid.reward.signals = (signal,)
            paid.train.advantage = "process"
            paid.tokenizer = dict(source="file", path=str(whole / "model")) | keys
        return build(RunConfig, paid)

    # before the workdir is claimed
    own = dict(source="train", path="", texts=20, vocab_size=280)
    for config, message in (
        (paid_by(9), r"no checkpoint of a process reward model of 9 updates; there are \[2, 4\]"),
        (paid_by(**own), "another tokenizer than the policy"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(config, tmp_path / "refused")
        assert not (tmp_path / "refused").exists()
    # nor does its training begin in the folder of a run
    with pytest.raises(
        ConfigError, match="is the workdir of a run; give the reward model a --work"
    ):
        process_training.train(settings(4), recorded)

    config = paid_by()
    train(config, tmp_path / "paid")
    rows = read_metrics(tmp_path / "paid")
    assert all(0 < row["reward/process/score"] < 1 for row in rows)
    found = find(tmp_path / "paid", 1, "0")
    again = list(play_again(config, tmp_path / "paid", found, range(2)))
    assert [one.difference for one in again] == [None] * 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(forks=dict(every=3)), r"every=3 chooses no border .*limits.turns=3; there are 2"),
        (
            dict(forks=None, advantage="monte_carlo"),
            r"config.train.advantage = 'monte_carlo' needs",
        ),
        (dict(forks=None, continuations=True), r"config.train.continuations = True needs contin"),
        (
            dict(forks=None, advantage="process"),
            r"advantage = 'process' credits turns with what 'process' pays, and .*\['tests'",
        ),
        (dict(forks=dict(continuations=0)), r"continuations=0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**keys)


def test_a_batch_has_room_for_continuations_that_are_trained_on():
    def rows(**keys):
        settings = settings_of(**keys)
        settings.train.pack.update(rows=None, slots=None, targets=None)
        return build(RunConfig, settings).train.pack

    plain, values, trained = rows(forks=None), rows(), rows(continuations=True)
    assert plain == values
    # two borders of two episodes, each with two continuations, beside the two episodes
    assert trained.rows * trained.slots >= 5 * plain.rows * plain.slots
