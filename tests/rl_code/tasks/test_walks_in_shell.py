"""Walks in shell commands: what is computed is what the commands print and do, and walks in the
terminal say what an episode says.
"""

from __future__ import annotations

import random

import pytest

from rl_code.config.named import Named
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.config import SandboxConfig
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.tasks.demonstrations import (
    DemonstrationConfig,
    check_demonstrable,
    demonstrate,
    walk_words,
)
from rl_code.tasks.repositories import LEVELS, generate
from rl_code.tasks.repository_walks import Change, Read, Search, Submit, walk
from rl_code.tasks.walks_in_shell import command_of
from rl_code.types import Limits
from tests.rl_code.tasks.walked import assert_said_by_episodes

LIMITS = Limits(turns=16, tokens=2000, turn_tokens=99, test_runs=3, command_s=60.0)
CARELESS = DemonstrationConfig(p_right=0.5, p_test=0.7, p_give_up=0.3, p_guess=0.2)


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(SandboxConfig()) as pool:
        yield pool


def some_tasks(count):
    return [generate("train", 0, i, (LEVELS[i % len(LEVELS)],)) for i in range(count)]


def test_commands_print_and_do_what_the_shell_does(pool):
    for index, task in enumerate(some_tasks(8)):
        messages = list(walk(task, random.Random(index), LIMITS, 1.0, 0.0, 0.0, 0.0))
        moves = [move for message in messages for move in message.moves]
        assert {type(move) for move in moves} == {Search, Read, Change, Submit}
        with pool.open(task.files) as sandbox:
            for move in (Search("def nothing_of_this_name"), *moves[:-1]):
                command = command_of(task, move)
                done = sandbox.run(["bash", "-c", command.text], timeout_s=60.0)
                assert (done.stdout, done.exit_code) == (command.output, command.code)
            assert sandbox.snapshot() == {**task.files, **task.reference}
    with pytest.raises(ValueError, match="no shell command makes the move Submit"):
        command_of(task, Submit())


@pytest.mark.parametrize(
    ("names", "protocol"),
    [
        (("terminal", "submit"), Compact()),
        (("terminal", "submit"), Compact(thoughts=True)),
        (("terminal", "grep", "think", "submit"), Compact()),
        (("terminal", "replace_lines", "try_lines", "submit"), Compact()),
    ],
)
def test_walks_with_a_terminal_say_what_an_episode_says(pool, names, protocol):
    tools = find_tools(tuple(map(Named, names)))
    check_demonstrable(protocol, tools, ("repositories",))
    words = walk_words(protocol, tools, None, None)
    pairs = [
        (task, demonstrate(task, random.Random(i), CARELESS, LIMITS, words=words))
        for i, task in enumerate(some_tasks(6))
    ]
    texts = ["".join(segment.text for segment in segments) for _, segments in pairs]
    assert ("<|call|>think" in "".join(texts)) == ("think" in names)
    assert ("<|call|>try" in "".join(texts)) == ("try_lines" in names)
    assert (" yes<|call|>" in "".join(texts)) == protocol.thoughts
    assert_said_by_episodes(pairs, protocol, tools, pool, LIMITS)
