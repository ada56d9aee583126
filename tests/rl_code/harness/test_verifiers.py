"""Environments of the package verifiers play tasks through the endpoint; what is sampled is written by
the test.

The driver is tested with a stand-in for the package, and where there is a Python that has it
(VERIFIERS_PYTHON=path/to/python), with the package.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path

import pytest

from configs import verifiers as config_file
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError, build
from rl_code.harness.agent import HarnessError
from rl_code.harness.harness import Harness
from rl_code.harness.verifiers import Verifiers
from rl_code.metrics.values import read_metrics
from rl_code.run.config import RunConfig
from rl_code.tasks.api import find_source
from rl_code.tasks.row_files import TaskFileError
from rl_code.train import train
from tests.rl_code.harness.chats import LIMITS, agent_episode, chat_tokenizer, say

ENVIRONMENTS = Path(__file__).with_name("environments")
PYTHON = os.environ.get("VERIFIERS_PYTHON", "")
REWARD = ("tests", dict(name="score", weight=2.0))

needs_package = pytest.mark.skipif(
    not PYTHON,
    reason="no Python with verifiers: python -m venv vf; vf/bin/pip install verifiers==0.3.1; "
    "VERIFIERS_PYTHON=vf/bin/python",
)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> str:
    """A Python that has the stand-in."""
    script = tmp_path_factory.mktemp("python") / "python"
    folder = ENVIRONMENTS / "stand_in"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def rows_of(python, environment="sums", split="train", folder="", **args):
    settings = dict(environment=environment, split=split, python=python, args=args, folder=folder)
    return find_source(Named("verifiers", settings), "config.tasks").load(None, None)


@functools.cache
def real_rows(**args):
    return rows_of(PYTHON, "small_sums", folder=str(ENVIRONMENTS), **args)


@pytest.fixture(scope="module")
def harness():
    """One for all tests: a process for each Python imports the package once."""
    made = Harness(Verifiers())
    yield made
    made.close()


@pytest.fixture
def play(harness, sandboxes):
    """Plays a task with written answers: (trajectory, what followed each answer, the episode)."""
    opened = []

    def run(task, answers, **limits):
        changed = dataclasses.replace(LIMITS, **limits)
        episode = agent_episode(task, sandboxes, harness, limits=changed, reward=REWARD)
        opened.append(episode)
        followed = [chat_tokenizer().decode(episode.start())]
        for answer in answers:
            tokens = say(episode, f"{answer}<|im_end|>")
            followed.append(tokens and chat_tokenizer().decode(tokens))
        return episode.finish(), followed, episode

    yield run
    for episode in opened:
        episode.close()


def test_an_environment_plays_and_says_what_it_is_worth(stand_in, play):
    tasks = rows_of(os.path.relpath(stand_in))  # from here, wherever the driver runs
    assert [task.id for task in tasks] == [f"sums/train/{n}" for n in range(3)]
    assert tasks[1].messages == ({"role": "user", "content": "1 + 2 = ?"},)
    trajectory, (prompt, hint, end), _ = play(tasks[1], ["5", "3"])
    assert "1 + 2 = ?" in prompt and "less" in hint and end is None
    assert (trajectory.status, trajectory.solved) == ("submitted", True)
    assert trajectory.scores == {"reward": 1.0, "guesses": 2.0}
    assert trajectory.reward.components == {"tests": 1.0, "score": 2.0}
    (context,) = trajectory.contexts
    said = [chat_tokenizer().encode(f"{n}<|im_end|>") for n in (5, 3)]
    assert context.tokens[context.sampled].tolist() == said[0] + said[1]
    assert (context.versions[context.sampled] == 3).all()


@pytest.mark.parametrize(
    ("limits", "status"), [(dict(turns=2), "turn_limit"), (dict(tokens=80), "token_limit")]
)
def test_an_episode_that_reaches_a_limit_is_scored(stand_in, play, limits, status):
    numbers = {"turn_limit": ["7", "6"], "token_limit": ["7" * 12] * 2}[status]
    trajectory, *_ = play(rows_of(stand_in)[0], numbers, **limits)
    assert (trajectory.status, trajectory.solved) == (status, False)
    assert trajectory.scores == {"reward": 0.25, "guesses": 2.0}
    assert trajectory.reward.components == {"tests": 0.0, "score": 0.5}


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        ("exit", "killed"),
        ("raise", "KeyError: 'its own bug'"),
        ("SandboxError", "SandboxError"),
        ("no number", "its reward is nan, no finite number"),
    ],
)
def test_an_episode_without_a_result_is_a_fault(stand_in, play, does, cause):
    trajectory, _, episode = play(rows_of(stand_in, does=does)[0], ["1"])
    assert (trajectory.status, trajectory.reward.flags) == ("fault", ("fault",))
    assert cause in episode._cause and trajectory.scores is None


def test_an_error_that_the_policy_brought_about_is_scored(stand_in, play):
    trajectory, *_ = play(rows_of(stand_in, does="ToolError")[0], ["1"])
    assert (trajectory.status, trajectory.reward.components["score"]) == ("submitted", 2.0)


def test_what_cannot_be_played_is_named(stand_in, harness, sandboxes, task):
    for settings, message in (
        (
            dict(split="eval"),
            "no rows of the split 'eval': load_environment gave eval_dataset None",
        ),
        (dict(rows=0), "gave dataset no rows"),
        (dict(group=True), "compares the episodes of a group"),
        (dict(environment="products"), "tasks.environment = 'products': .*Could not import"),
        (dict(sums=1), "unexpected keyword argument 'sums'"),
    ):
        with pytest.raises(TaskFileError, match=message):
            rows_of(stand_in, **settings)
    with pytest.raises(TaskFileError, match=r"tasks.python = 'no_such_python' cannot be started"):
        rows_of("no_such_python")
    if not PYTHON:
        with pytest.raises(TaskFileError, match=r"pip install verifiers==0.3.1"):
            rows_of(sys.executable)
    with pytest.raises(ValueError, match=r"self.split='test' is not one of train, eval"):
        rows_of(stand_in, split="test")
    episode = agent_episode(task, sandboxes, harness)
    with pytest.raises(HarnessError, match="is of no environment of verifiers"):
        episode.start()
    episode.close()


def test_a_row_that_the_environment_has_no_more_is_named(stand_in, harness, sandboxes):
    (*_, last) = rows_of(stand_in)
    gone = {**last.meta["verifiers"], "args": {"rows": 2}}
    task = dataclasses.replace(last, meta={**last.meta, "verifiers": gone})
    episode = agent_episode(task, sandboxes, harness)
    with pytest.raises(HarnessError, match="IndexError"):
        episode.start()
    episode.close()


def smoke(python, **tasks):
    config = config_file.get_config("smoke")
    for section in (config.tasks, config.suites[0]["tasks"]):
        section.update(python=python, **tasks)
    return config


@pytest.mark.long
def test_a_run_trains_on_an_environment(stand_in, tmp_path):
    config = smoke(stand_in, environment="sums", folder="")
    train(build(RunConfig, config), tmp_path)
    rows = read_metrics(tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert row["scores/reward"] == row["reward/total"] > 0
        assert row["episode/faults"] == 0


def test_tasks_of_an_environment_need_its_harness():
    config = config_file.get_config("smoke")
    config.harness = "mini_swe_agent"
    with pytest.raises(ConfigError, match=r"only with config.harness = 'verifiers'"):
        build(RunConfig, config)


@needs_package
def test_a_single_turn_of_the_package_is_scored(play, monkeypatch):
    encoded = []
    encode = type(chat_tokenizer()).encode
    monkeypatch.setattr(
        type(chat_tokenizer()),
        "encode",
        lambda self, text: encoded.append(text) or encode(self, text),
    )
    tasks = real_rows()
    for answer, reward in (("3", 1.0), ("4", 0.25), ("three", 0.0), ("", 0.0)):
        trajectory, (prompt, end), _ = play(tasks[1], [answer])
        assert "Answer with a number." in prompt and "1 + 2 = ?" in prompt and end is None
        assert (trajectory.status, trajectory.solved) == ("submitted", reward == 1.0)
        assert trajectory.scores["correct"] == trajectory.scores["reward"] == reward
        assert trajectory.reward.components["score"] == 2 * reward
        (context,) = trajectory.contexts
        assert context.sampled.sum() == len(encode(chat_tokenizer(), f"{answer}<|im_end|>"))
    # each prompt once, and what the test itself wrote
    assert sum("1 + 2 = ?" in text for text in encoded) == 4


@needs_package
def test_tools_of_the_package_are_called(play):
    (task, *_) = real_rows(kind="tools", rows=1)
    body = '{"name": "add", "arguments": {"a": 0, "b": 1}}'
    trajectory, (prompt, result, end), episode = play(
        task, [f"<tool_call>\n{body}\n</tool_call>", "1"]
    )
    assert '"name": "add"' in prompt and "<tool_response>\n1\n</tool_response>" in result
    assert end is None and (trajectory.status, trajectory.solved) == ("submitted", True)
    assert trajectory.scores["add_calls"] == 1.0 and trajectory.scores["num_turns"] == 2.0
    # one context: the history went on word by word, and nothing of it was tokenised again
    (context,) = trajectory.contexts
    assert episode.session.whole(0) == context.tokens.tolist()
    (call,) = [call for turn in trajectory.turns for call in turn.calls]
    assert (call.name, call.arguments) == ("add", {"a": 0, "b": 1})


@needs_package
@pytest.mark.parametrize(
    ("limits", "status"), [(dict(turns=2), "turn_limit"), (dict(tokens=110), "token_limit")]
)
def test_the_package_scores_what_a_limit_ended(play, limits, status):
    number = "7" if status == "turn_limit" else "7" * 12
    trajectory, *_ = play(real_rows(kind="guesses")[0], [number] * 2, **limits)
    assert (trajectory.status, trajectory.solved) == (status, False)
    assert trajectory.scores["reward"] == 0.25


@needs_package
def test_errors_of_the_package_are_told_apart(play):
    # the environment ends the episode over what the policy said
    trajectory, *_ = play(real_rows(kind="guesses")[0], ["no number"])
    assert (trajectory.status, trajectory.scores["reward"]) == ("submitted", 0.0)
    # it relies on something that fails
    trajectory, _, episode = play(real_rows(kind="broken")[0], ["2"])
    assert trajectory.status == "fault" and "its machine is gone" in episode._cause
    with pytest.raises(TaskFileError, match="compares the episodes of a group"):
        real_rows(kind="group")


@needs_package
def test_a_run_trains_on_an_environment_of_the_package(tmp_path):
    train(build(RunConfig, smoke(PYTHON)), tmp_path)
    rows = read_metrics(tmp_path)
    assert len(rows) == 2 and all("scores/correct" in row for row in rows)
