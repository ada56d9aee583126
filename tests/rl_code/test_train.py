"""Properties of the loop's parts that need no run."""

from __future__ import annotations

import dataclasses
import types

import pytest

from configs import quickstart
from rl_code import train as train_lib
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.evaluation.suite import SuiteResult, TaskResult, load_all
from rl_code.learner.optimizer import learning_rate
from rl_code.run.config import RunConfig
from rl_code.run.workdir import check, own


def test_a_suite_is_played_again_when_a_finished_run_was_trained_further(tmp_path, capsys):
    suite = types.SimpleNamespace(name="held_out", samples=1)
    played = []

    def evaluate(suite, model, *, label, step, on_finished) -> SuiteResult:
        played.append((label, step))
        return SuiteResult(suite.name, label, step, {}, (task,))

    task = TaskResult(**{field.name: 1 for field in dataclasses.fields(TaskResult)} | {"id": "t"})
    run = types.SimpleNamespace(
        config=types.SimpleNamespace(suites=(suite,)),
        workdir=tmp_path,
        task_sets=types.SimpleNamespace(of_suite=lambda suite: [task]),
        evaluate=evaluate,
    )
    for step in (5, 5, 7):
        train_lib.evaluate(run, None, "after", step)
    assert played == [("after", 5), ("after", 7)]
    assert [(r.label, r.step) for r in load_all(tmp_path)] == [("step_5", 5), ("after", 7)]


def configured(**train) -> RunConfig:
    settings = quickstart.get_config("smoke").to_dict()
    return read_config.build(RunConfig, settings | {"train": settings["train"] | train})


def test_raised_steps_mean_the_learning_rates_of_the_longer_run(tmp_path):
    short, long = configured(steps=40), configured(steps=80)
    # The shorter run ends at a rate of 0; what goes on has the rate of the longer run there.
    rates = [float(learning_rate(config.train.optimizer, 40)) for config in (short, long)]
    assert rates[0] == 0.0 < rates[1]
    own(tmp_path, short)
    check(tmp_path, long)
    with pytest.raises(ConfigError, match="group_size"):
        check(tmp_path, configured(steps=40, group_size=2))
