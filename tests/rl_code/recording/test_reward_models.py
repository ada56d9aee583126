"""A reward model of recorded outcomes learns what tells them apart, and is judged on other tasks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from flax import nnx

from configs import quickstart
from launch import reward_model as command
from models import huggingface
from models.transformer import Transformer
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError, build
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.recording.reward_models import (
    RewardModelConfig,
    change_of,
    make,
    outcomes_of_run,
    quality_of,
    split,
)
from rl_code.report.reliability import draw
from rl_code.rewards.reward_model_fit import Outcome
from rl_code.rewards.scorer import Scorer
from rl_code.run.config import RunConfig
from rl_code.run.workdir import CONFIG_FILE, STORE
from rl_code.store.store import GroupStore
from rl_code.types import Fork, Group, Reward
from tests.models.small import narrow_preset
from tests.rl_code.recording.test_review import FIX, SUBMIT, TASK, play
from tests.rl_code.rewards.folders import make_tokenizer
from tests.rl_code.store.groups import make_group, make_items

STEPS = 3


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A small model with random parameters, as a Hugging Face folder."""

    folder = tmp_path_factory.mktemp("weights") / "model"
    tokenizer = make_tokenizer()
    shape = dataclasses.replace(narrow_preset(), vocab_size=tokenizer.vocab_size)
    huggingface.save(folder, Transformer(shape, nnx.Rngs(0)), max_positions=512)
    tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A recorded run whose notes hold changes: good work adds x, bad work adds y."""
    workdir = tmp_path_factory.mktemp("run")
    config = build(RunConfig, quickstart.get_config("smoke"))
    (workdir / CONFIG_FILE).write_text(read_config.to_json(config))
    store = GroupStore(workdir / STORE, "learner")
    for step in range(STEPS):
        items = make_items(step, 10, group_size=4)
        store.plan(items)
        for item in items:
            group = make_group(item, version=step)
            members = [
                noted(trajectory, good=(trajectory.index + item.number) % 2 == 0)
                for trajectory in group.trajectories
            ]
            parted = dataclasses.replace(members[0], index=4, fork=Fork(0, 0, (0,)))
            # the groups of one task have a continuation
            more = (parted,) if item.number == 0 else None
            store.deliver(item, Group(group.task, tuple(members), more))
        store.consume(step, store.read(step), version=step)
    return workdir


def noted(trajectory, good: bool):
    work = f"file a.py\n@ line 1\n+{'x' if good else 'y'} = {trajectory.index}"
    # one of each group is a proven cheat, and not read
    flags = ("canary_passed",) if trajectory.index == 3 else ()
    reward = Reward(0.0, {"m": 0.0}, flags, {"m": {"work": work}})
    return dataclasses.replace(trajectory, reward=reward, solved=good)


def configured(weights: Path, *runs: Path, **changes) -> RewardModelConfig:
    section = dict(
        weights=str(weights),
        runs=tuple(map(str, runs)),
        reading=dict(tokens=96),
        fit=dict(updates=60, rows=2, optimizer=dict(learning_rate=0.01)),
        held_out=0.3,
    )
    return build(RewardModelConfig, section | changes)


def test_outcomes_are_read_from_notes_and_cheats_are_not(weights, run):
    config = configured(weights, run)
    tokenizer = make_tokenizer()
    outcomes = list(outcomes_of_run(run, config, tokenizer))
    assert len(outcomes) == STEPS * (10 * 3 + 1)
    assert len({one.task for one in outcomes}) == 10
    for one in outcomes[:6]:
        assert ("+x" if one.good else "+y") in tokenizer.decode(one.tokens)
    some = dataclasses.replace(config, first=1, last=3, every=2)
    assert len(list(outcomes_of_run(run, some, tokenizer))) == 31
    with pytest.raises(ConfigError, match="has no steps 9 to None"):
        list(outcomes_of_run(run, dataclasses.replace(config, first=9), tokenizer))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["outcomes", "pairs"])
def test_a_model_tells_the_outcomes_of_other_tasks_apart(weights, run, tmp_path, kind, capsys):
    fit = dict(updates=60, rows=2, kind=kind, optimizer=dict(learning_rate=0.01))
    config = configured(weights, run, fit=fit)
    report = make(config, tmp_path / "rm")
    assert "reward model  60/60  loss" in capsys.readouterr().err
    quality = quality_of(report)
    assert quality.auc == 1.0 and quality.auc_within == 1.0 and quality.ece < 0.2
    assert report["tasks"]["trained"] + report["tasks"]["held_out"] == 10
    # the folder pays as the report says
    one = Scorer(tmp_path / "rm")
    task = make_group(make_items(0, 1)[0]).task
    good, bad = (
        one.score(one.ids(task, f"file a.py\n@ line 1\n+{name} = 7", None))[1] for name in "xy"
    )
    assert good > 0.5 > bad
    # made once, and not with another config
    assert make(config, tmp_path / "rm") == report
    with pytest.raises(ConfigError, match="held_out"):
        make(dataclasses.replace(config, held_out=0.5), tmp_path / "rm")
    draw(quality, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


@pytest.mark.long
def test_the_command_prints_the_measures(weights, run, tmp_path, capsys):
    section = read_config.to_dict(configured(weights, run))
    command.main(section, str(tmp_path / "rm"))
    assert "AUC 1.000" in capsys.readouterr().out
    assert (tmp_path / "rm" / "reliability.png").exists()
    assert json.loads((tmp_path / "rm" / "reward_model.json").read_text())["judged"]["auc"] == 1.0


def test_calls_on_record_are_carried_out_again_where_there_are_no_notes():
    config = build(RunConfig, quickstart.get_config("smoke"))
    with SandboxPool(SandboxConfig()) as pool:
        trajectory = play(pool, FIX, SUBMIT)
        assert trajectory.reward.notes is None
        group = Group(TASK, (trajectory,))
        change = change_of(group, trajectory, config, pool)
        assert change == "file f.py\n@ line 4\n-    y = x - 1\n+    y = x + 1"
        left = dataclasses.replace(trajectory, status="turn_limit")
        assert change_of(group, left, config, pool) is None


def test_a_task_stays_in_its_part():
    outcomes = [Outcome(f"t{n % 50}", (n,), n % 2 == 0) for n in range(200)]
    trained, held_out = split(outcomes, 0.25, seed=0)
    assert not {one.task for one in trained} & {one.task for one in held_out}
    assert 5 <= len({one.task for one in held_out}) <= 20
    again = split(outcomes[::-1], 0.25, seed=0)
    assert {one.task for one in again[1]} == {one.task for one in held_out}
    assert {one.task for one in split(outcomes, 0.25, 1)[1]} != {one.task for one in held_out}


def test_outcomes_of_one_kind_are_refused(weights, run, tmp_path):
    config = configured(weights, run, held_out=0.01)
    with pytest.raises(ConfigError, match="both kinds are needed"):
        make(config, tmp_path / "rm")
    assert not (tmp_path / "rm").exists()
    with pytest.raises(ConfigError, match="is the workdir of a run"):
        make(config, run)
    with pytest.raises(ConfigError, match="must name what it is made of"):
        configured(weights)
