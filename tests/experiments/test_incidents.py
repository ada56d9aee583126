"""Broken calls that are dropped or counted, and questions in place of edits: tasks, credit, rewards
and what is measured.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from configs import broken_calls, questions
from experiments.incidents.broken_calls import BrokenCalls, Credited
from experiments.incidents.questions import Edited, Questions
from experiments.incidents.tasks import FromWords
from models.families import PRESETS
from rl_code import sft
from rl_code.config import read_config
from rl_code.config.named import Named
from rl_code.environment.finished import Grade
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.ask import ANSWER, Ask
from rl_code.environment.tools.workspace import Workspace
from rl_code.learner.advantages import group_advantages
from rl_code.metrics.values import read_metrics
from rl_code.run.config import RunConfig
from rl_code.tasks.demonstrations import DemonstrationConfig, demonstrate
from rl_code.tasks.programs import split_of
from rl_code.train import train
from rl_code.types import Group, Limits, Reward, ToolCall, Turn
from tests.models.small import narrow_preset
from tests.rl_code.rewards.test_rewards import finished

pytestmark = pytest.mark.usefixtures("traced_once")

LIMITS = Limits(turns=2, tokens=112, turn_tokens=56, test_runs=0, command_s=5.0)
TOOLS = find_tools([Named(name) for name in ("write_file", "run_tests", "submit", "ask")])


def source(**settings) -> FromWords:
    return FromWords(**{"split": "train", "levels": (1, 2), "unclear": "two", **settings})


def built(config, **overrides) -> RunConfig:
    given = config.get_config("smoke")
    for key, value in overrides.items():
        with given.ignore_type():
            given.update_from_flattened_dict({key: value})
    return read_config.build(RunConfig, given)


def trajectory(*calls: ToolCall, reward: float = 0.0, solved: bool = False, malformed: int = 0):
    base = finished(Grade(submitted=False)).trajectory
    message = Turn("assistant", 5, 9, "", calls=calls)
    done = any(call.name == "submit" for call in calls)
    return dataclasses.replace(
        base,
        turns=(base.turns[0], message),
        reward=Reward(reward, {}),
        solved=solved,
        malformed_calls=malformed,
        status="submitted" if done else "turn_limit",
    )


def test_an_unclear_task_leaves_the_answer_to_the_person():
    for unclear in ("open", "two"):
        tasks = source(unclear=unclear).load(None, None)[:200]
        clear = [task for task in tasks if task.meta["clear"]]
        assert 0.4 < len(clear) / len(tasks) < 0.6
        for task in tasks:
            said, meant = task.messages[0]["content"], task.meta[ANSWER]
            assert (meant in said.split(", ")) == task.meta["clear"]
            names = tuple(name for name, _ in task.meta["program"])
            assert split_of(names) == "train" and not task.visible_tests.cases
        for task in (task for task in tasks if not task.meta["clear"]):
            said = task.messages[0]["content"]
            assert (" or " in said) == (unclear == "two")
    assert source().task(5) == source().task(5) != source(seed=1).task(5)


def test_of_two_readings_the_first_is_meant_as_often_as_the_second():
    first = []
    for task in source(share=1.0, levels=(1,)).load(None, None)[:300]:
        said = task.messages[0]["content"].split()
        at = said.index("or")
        first.append(said[at - 1] in task.meta[ANSWER].split())
    assert 0.4 < np.mean(first) < 0.6


def test_demonstrations_break_calls_and_ask_as_often_as_the_config_says():
    tasks = source(broken=0.2, asks_clear=0.3, asks_unclear=0.7, again=0.4).load(None, None)[:1000]
    written = []
    for task in tasks:
        prompt, *rest = demonstrate(task, random.Random(0), DemonstrationConfig(), LIMITS)
        assert not prompt.sampled and task.messages[0]["content"] in prompt.text
        written.append([segment.text for segment in rest if segment.sampled])
        for text in written[-1]:
            calls = Compact().parse(text.removesuffix("<|eot|>"), task, TOOLS)
            assert any(call.error for call in calls) == (text == "<|call|>write<|end|><|eot|>")
    shares = [
        np.mean([texts[0].startswith(f"<|call|>{word}<|end|>") for texts in written])
        for word in ("write", "ask")
    ]
    assert shares == pytest.approx([0.2, 0.4], abs=0.05)
    for clear, share in ((True, 0.8 * 0.3), (False, 0.8 * 0.7)):
        asks = [
            "|>ask<" in texts[0]
            for task, texts in zip(tasks, written, strict=True)
            if task.meta["clear"] == clear
        ]
        assert np.mean(asks) == pytest.approx(share, abs=0.06)
    again = [texts[1].startswith("<|call|>ask") for texts in written if "|>ask<" in texts[0]]
    assert np.mean(again) == pytest.approx(0.4, abs=0.08)


def test_the_person_says_what_is_meant():
    task = source(share=1.0).task(0)
    workspace = Workspace(task, None, LIMITS, verbose=False)
    assert Ask().run({}, workspace).content == task.meta[ANSWER]
    alone = Workspace(dataclasses.replace(task, meta={}), None, LIMITS, verbose=False)
    answer = Ask().run({"question": "which?"}, alone)
    assert not answer.ok and "nobody" in answer.content


def test_a_dropped_episode_earns_the_baseline_and_a_counted_one_its_reward():
    rewards = (1.0, 0.0, -0.1)
    broken = (0, 0, 1)
    ones = tuple(
        trajectory(reward=reward, malformed=count)
        for reward, count in zip(rewards, broken, strict=True)
    )
    group = Group(source().task(0), ones)
    for credited, wanted in (
        (Credited(drop=True, baseline=0.5), (0.5, -0.5, 0.0)),
        (Credited(drop=False, baseline=0.5), (0.5, -0.5, -0.6)),
        (Credited(drop=True, baseline=None), (0.5, -0.5, 0.0)),
        (Credited(drop=False, baseline=None), (0.7, -0.3, -0.4)),
    ):
        assert list(group_advantages([group], credited)[0]) == pytest.approx(wanted)
    nothing_left = dataclasses.replace(group, trajectories=ones[2:])
    assert list(Credited(drop=True, baseline=None)(nothing_left)) == [0.0]


def test_a_reward_of_edits_alone_pays_deferring_and_the_other_does_not():
    ask, submit = ToolCall("ask", {}), ToolCall("submit", {})
    costs = dict(without=-1.0, clear=0.25)
    for is_clear in (True, False):
        task = source(share=0.0 if is_clear else 1.0).task(0)
        for calls, solved, alone, priced in (
            ((submit,), True, 1.0, 1.0),
            ((submit,), False, -1.0, -1.0),
            ((ask, submit), True, 1.0, 0.75 if is_clear else 1.0),
            ((ask, ask), False, 0.0, -1.5 if is_clear else -1.0),
        ):
            grade = Grade(submitted=submit in calls, hidden=(solved,))
            episode = dataclasses.replace(
                finished(grade), task=task, trajectory=trajectory(*calls), grade=grade
            )
            assert Edited()(episode) == alone
            assert Edited(**costs)(episode) == priced
    with pytest.raises(ValueError, match="unclear=-1"):
        Edited(unclear=-1)


def test_metrics_tell_clear_tasks_from_others():
    ask, submit = ToolCall("ask", {}), ToolCall("submit", {})
    groups = [
        Group(
            source(share=0.0).task(0), (trajectory(submit, solved=True), trajectory(malformed=1))
        ),
        Group(source(share=1.0).task(0), (trajectory(ask, submit), trajectory(ask))),
    ]
    assert BrokenCalls()(groups, {}) == {
        "calls/broken_clear": 0.5,
        "calls/solved_clear": 0.5,
        "calls/broken_unclear": 0.0,
        "calls/solved_unclear": 0.0,
    }
    assert Questions()(groups, {}) == {
        "questions/edits_clear": 0.5,
        "questions/asks_clear": 0.0,
        "questions/solved_clear": 0.5,
        "questions/edits_unclear": 0.5,
        "questions/asks_unclear": 1.0,
        "questions/solved_unclear": 0.0,
    }
    assert "calls/broken_unclear" not in BrokenCalls()(groups[:1], {})


@pytest.mark.parametrize(
    "wrong", [{"unclear": "some"}, {"share": 2.0}, {"broken": -0.1}, {"levels": (9,)}]
)
def test_wrong_settings_are_named(wrong):
    ((name, _),) = wrong.items()
    with pytest.raises(ValueError, match=name):
        source(**wrong)


@pytest.mark.parametrize("config", [broken_calls, questions], ids=["broken_calls", "questions"])
def test_all_arms_of_a_seed_share_the_warm_start(config):
    for arm in config.get_sweep("smoke"):
        changed = {key: value for key, value in arm.items() if key not in ("variant", "seed")}
        other = built(config, **changed)
        assert read_config.diff(built(config), other, without=sft.may_differ(other)) == []


@pytest.mark.long
@pytest.mark.parametrize("config", [broken_calls, questions], ids=["broken_calls", "questions"])
def test_the_smoke_run_measures_what_the_figure_shows(config, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", narrow_preset())
    train(built(config), tmp_path)
    rows = read_metrics(tmp_path)
    for kind, metric, *_ in config.get_figure("smoke"):
        assert kind == "curve" and any(metric in row for row in rows), metric
