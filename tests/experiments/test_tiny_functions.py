"""Split functions do the same, and cost less function by function and more as a whole."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest

from experiments.tiny_functions.lengths import lengths
from experiments.tiny_functions.per_function import OfFunctions, PerFunction
from experiments.tiny_functions.source import Functions, text_of
from rl_code.environment.finished import Grade
from rl_code.rewards.quality import Quality
from rl_code.tasks.demonstrations import DemonstrationConfig, demonstrate
from rl_code.types import Limits, ToolCall
from tests.rl_code.environment.conftest import call_here
from tests.rl_code.rewards.test_rewards import finished

LIMITS = Limits(turns=1, tokens=200, turn_tokens=100, test_runs=0, command_s=5.0)


def paid(signal, task, text, solved=True):
    episode = dataclasses.replace(
        finished(Grade(True, (True,), (solved,))),
        task=task,
        files_before=dict(task.files),
        files_after={**task.files, task.path: text},
    )
    return signal(episode)


def test_both_forms_solve_a_task_and_cost_in_opposite_orders():
    task = Functions("train").task(0)
    texts = [text_of(task, task.meta["program"], split) for split in (False, True)]
    for text in texts:
        for case in (*task.visible_tests.cases, *task.hidden_tests.cases):
            (result,) = call_here(text, "f", [case.args])
            assert result.ok and result.value == case.expected
    assert lengths(texts) == [3, 3, 2] or lengths(texts) == [3, 2, 3]
    whole, split = (paid(PerFunction(), task, text) for text in texts)
    assert (whole, split) == (pytest.approx(-0.3), pytest.approx(-0.15))
    assert paid(Quality(), task, texts[1]) < paid(Quality(), task, texts[0]) == 0.0
    assert paid(PerFunction(), task, texts[0], solved=False) == 0.0
    assert paid(PerFunction(), task, "def f(:") == -1.0


def test_demonstrations_are_split_as_often_as_the_source_says():
    for tiny in (0.0, 0.4, 1.0):
        source = Functions("train", tiny=tiny)
        said = []
        for index in range(150):
            segments = demonstrate(
                source.task(index), random.Random(0), DemonstrationConfig(), LIMITS
            )
            (text,) = [one.text for one in segments if one.sampled]
            said.append("def g(" in text)
        assert abs(sum(said) / len(said) - tiny) < 0.12


def test_functions_of_solved_work_are_counted():
    def episode(solved, *texts):
        calls = [ToolCall("write_file", {"content": text}) for text in texts]
        return SimpleNamespace(solved=solved, turns=[SimpleNamespace(calls=calls)])

    one, two = "def f():\n    return 1\n", "def g():\n    return 1\n\n\ndef f():\n    return g()\n"
    groups = [SimpleNamespace(own=[episode(True, one, two), episode(True, one)])]
    groups.append(SimpleNamespace(own=[episode(False, two)]))
    assert OfFunctions()(groups, {}) == {
        "functions/count": 1.5,
        "functions/split": 0.5,
        "functions/lines": 3.0,
    }
    assert OfFunctions()(groups[1:], {}) == {}


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="tiny"):
        Functions("train", tiny=2.0)
