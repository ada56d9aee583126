"""Walks through repositories that write tests of their own, good ones and bad ones."""

from __future__ import annotations

import dataclasses
import random

from rl_code.config.named import Named
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.config import SandboxConfig
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.write_tests import WriteTests
from rl_code.tasks.demonstrations import demonstrate
from rl_code.tasks.repositories import generate
from rl_code.tasks.walks_in_tools import TOOLS, ToolWords
from tests.rl_code.tasks.test_repositories import IMPERFECT, LIMITS, call, calls_of
from tests.rl_code.tasks.walked import assert_said_by_episodes

OWN_TESTS = WriteTests().path
WITH = dict(TOOLS) | find_tools((Named("write_tests"),))
OFTEN = dataclasses.replace(IMPERFECT, p_right=1.0, p_own_tests=0.7)


def walk(task, seed, config, tools):
    return demonstrate(task, random.Random(seed), config, LIMITS, words=ToolWords(tools))


def passes(files):
    try:
        return call(files, f"{OWN_TESTS}:test_own", ()) is None
    except AssertionError:
        return False


def test_walks_write_tests_that_pass_on_the_reference():
    asserted = []
    for index in range(24):
        task = generate("train", 3, index, (0, 1))
        *calls, last = calls_of(task, walk(task, index, OFTEN, WITH), WITH)
        assert last.name == "submit"
        written = [call.arguments for call in calls if call.name == "write_tests"]
        if not written:
            continue
        assert calls[-1].name == "write_tests"
        tests = {OWN_TESTS: written[0]["content"]}
        asserted.append(tests[OWN_TESTS].count("assert"))
        assert passes({**task.files, **task.reference, **tests})
        if asserted[-1] == 2:  # all that is visible, which the fault fails
            assert not passes({**task.files, **tests})
    assert 8 < len(asserted) < 24 and set(asserted) == {0, 1, 2}


def test_without_the_tool_or_the_probability_walks_stay_what_they_were():
    plain = dataclasses.replace(OFTEN, p_own_tests=0.0)
    task = generate("train", 3, 0, (0, 1))
    said = [
        [segment.text for segment in walk(task, 0, config, tools) if segment.sampled]
        for config, tools in ((plain, TOOLS), (OFTEN, TOOLS), (plain, WITH))
    ]
    assert said[0] == said[1] == said[2]


def test_walks_with_tests_are_said_by_episodes():
    pairs = []
    for index in range(3):
        task = generate("train", 3, index, (0,))
        config = dataclasses.replace(OFTEN, p_own_tests=1.0)
        pairs.append((task, walk(task, index, config, WITH)))
    with SandboxPool(SandboxConfig()) as pool:
        limits = dataclasses.replace(LIMITS, turn_tokens=200)
        assert_said_by_episodes(pairs, Compact(), WITH, pool, limits)
