"""Tasks that tell of an attempt: in the words of the feedback, and their demonstrations use it."""

from __future__ import annotations

import random

import pytest

from experiments.self_distillation.source import Told
from rl_code.config.named import Named
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.tools.api import find_tools
from rl_code.learner.feedback import FailedTests, SolvedSibling
from rl_code.tasks.demonstrations import DemonstrationConfig, demonstrate
from rl_code.tasks.generated import Generated
from rl_code.types import Limits

OF = Named("generated", {"split": "train", "levels": (1, 2)})
LIMITS = Limits(5, 288, 64, 3, 5.0)


def test_a_share_of_the_tasks_tells_what_solved_them():
    plain = Generated(split="train", levels=(1, 2)).load(None, None)
    told = Told(OF, LIMITS.test_runs).load(None, None)
    pairs = [(plain[index], told[index]) for index in range(200)]
    changed = [(one, other) for one, other in pairs if one != other]
    assert 60 < len(changed) < 100
    tests: list[bool] = []
    for one, other in changed:
        said = other.messages[-1]["content"].removeprefix(one.messages[-1]["content"])
        assert said.startswith(f"\n\n{SolvedSibling().words}\n")
        # what is written is what the last message told wrote
        *_, last = said.partition(SolvedSibling().words)[2].strip().split("<|eot|>\n")
        write, submit = Compact().parse(last.removesuffix("<|eot|>"), other, find_tools())
        assert submit.name == "submit"
        (solution,) = one.reference.values()
        assert write.arguments["content"].strip() == solution.strip()
        _, first, *then = demonstrate(other, random.Random(0), DemonstrationConfig(0.0), LIMITS)
        assert first.sampled and solution.strip() in first.text
        tests.append(bool(then))
    # it is tested as often as what is shown without being told
    assert 0.35 < sum(tests) / len(tests) < 0.65
    assert {task.messages[-1]["content"].count("<|eot|>") for _, task in changed} == {1, 2}
    with pytest.raises(ValueError, match=r"share=1\.5"):
        Told(OF, 3, share=1.5)
    with pytest.raises(ValueError, match="test_runs=-1"):
        Told(OF, -1)
    with pytest.raises(
        ValueError, match="tells='hint' must be one of solved_sibling, failed_tests"
    ):
        Told(OF, 3, tells="hint")


def test_a_share_of_the_tasks_tells_which_tests_an_attempt_failed():
    plain = Generated(split="train", levels=(1, 2)).load(None, None)
    told = Told(OF, LIMITS.test_runs, tells="failed_tests").load(None, None)
    pairs = [(plain[index], told[index]) for index in range(200)]
    changed = [(one, other) for one, other in pairs if one != other]
    assert 40 < len(changed) < 100
    for one, other in changed:
        said = other.messages[-1]["content"].removeprefix(one.messages[-1]["content"])
        first, *lines = said.strip().split("\n")
        assert first == FailedTests().words and 1 <= len(lines) <= FailedTests().most
        assert all(line.startswith(f"{one.entry_point}(") for line in lines)
        _, written, *_ = demonstrate(other, random.Random(0), DemonstrationConfig(0.0), LIMITS)
        (solution,) = one.reference.values()
        assert written.sampled and solution.strip() in written.text
