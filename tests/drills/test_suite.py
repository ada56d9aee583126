"""A suite from outside of the tree, as docs/adding.md adds it."""

from __future__ import annotations

import json

import pytest

from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.evaluation.suite import from_groups
from rl_code.evaluation.suites import SUITES, SuiteConfig
from rl_code.rollout.sampling import SamplingConfig
from rl_code.run.run import Run
from rl_code.types import Group
from tests.drills.episodes import LIMITS, SUBMIT, configured, write

LONG = dict(
    name="my_lab.suites:LongSolutions",
    label="very_long",
    lines=6,
    count=3,
    samples=2,
    limits=read_config.to_dict(LIMITS),
)


def test_a_suite_from_outside_is_chosen_played_and_counted(outside, tmp_path):
    outside("A suite")
    config = configured(suites=(LONG,), tokenizer=dict(source="train", texts=20))
    (suite,) = config.suites
    with Run(config, tmp_path) as run:
        tasks = run.task_sets.of_suite(suite)
        assert len(tasks) == 3 and len({task.id for task in tasks}) == 3
        assert all(len(task.reference[task.path].splitlines()) >= 6 for task in tasks)
        groups = [Group(task, tuple(play(run, suite, task))) for task in tasks]
    result = from_groups(suite.name, "script", 0, {}, groups)
    assert (result.suite, result.largest_k) == ("very_long", 2)
    assert [task.correct for task in result.tasks] == [1, 1, 1]


def play(run, suite, task):
    """One episode that hands in the reference and one that hands in nothing new."""
    for index, message in enumerate((write(task.reference[task.path]) + SUBMIT, SUBMIT)):
        episode = run.episode(task, 0, index, protocol=suite.protocol, limits=suite.limits)
        episode.start()
        tokens = run.tokenizer.encode(message + "<|eot|>")
        assert episode.step(tokens, [0.0] * len(tokens), [0] * len(tokens)) is None
        yield episode.finish()


def test_a_suite_may_be_named_changed_or_written_out():
    tasks = dict(name="humaneval", form="chat")
    suites = (
        "humaneval",
        dict(name="humaneval", label="five", count=5),
        dict(name="mine", tasks=tasks),
    )
    named, changed, written = configured(suites=suites).suites
    assert named.tasks == SUITES["humaneval"].tasks and named.protocol.name == "raw_completion"
    assert (changed.name, changed.count, changed.sampling) == ("five", 5, SamplingConfig(0.0))
    assert written.name == "mine" and written.tasks.settings == {"form": "chat"}
    for suite in (named, changed, written):
        again = json.loads(read_config.to_json(suite))
        assert SuiteConfig.from_config(again, "suite") == suite


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ("humanevil", r"config\.suites\[0\] = 'humanevil'.*Did you mean 'humaneval'"),
        ("my_lab.suites:Long", r"config\.suites\[0\].*my_lab\.suites has no 'Long'"),
        (dict(LONG, linse=3), r"config\.suites\[0\]\.linse: no such key.*Did you mean 'lines'"),
        ("my_lab.suites:Named", "is no SuiteConfig"),
        (dict(LONG, count=0), "count=0 plays all, and those of 'generated' are endless"),
        (dict(name="x", tasks="generated"), r"config\.suites\[0\]\.tasks\.split: missing"),
    ],
)
def test_a_wrong_suite_is_named_when_the_config_is_built(outside, suite, message):
    outside("A suite")
    with pytest.raises(ConfigError, match=message):
        configured(suites=(suite,))
