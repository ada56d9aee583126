"""A hunk is needless exactly when the work solves the task without it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokenizer import Tokenizer
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.recording.review import hunks, review, without
from rl_code.types import Case, Limits, Task, Tests
from tests.rl_code.environment import scripted

LIMITS = Limits(turns=6, tokens=2000, turn_tokens=600, test_runs=3, command_s=20.0)
BROKEN = "import math\n\ndef f(x):\n    y = x - 1\n    return y\n"
TASK = Task(
    id="two/0",
    messages=({"role": "user", "content": "add one"},),
    files={"f.py": BROKEN, "other.py": "a = 1\nb = 2\n"},
    path="f.py",
    entry_point="f",
    visible_tests=Tests(cases=(Case((1,), 2),)),
    hidden_tests=Tests(cases=(Case((5,), 6),)),
    reference={},
)
FIX = "<|call|>run\nsed -i 's/x - 1/x + 1/' f.py<|end|>"
SPOIL = "<|call|>run\nsed -i 's/^import math/import os/; s/return y/return y  # done/' f.py<|end|>"
NEW = "<|call|>run\necho 'b = 3' >> other.py; echo note > todo.txt<|end|>"
SUBMIT = "<|call|>submit<|end|>"

lines = st.lists(st.sampled_from("abc"), max_size=8).map(lambda x: "".join(f"{y}\n" for y in x))
trees = st.dictionaries(st.sampled_from(("p", "q", "r")), lines, max_size=3)


@given(trees, trees)
@settings(max_examples=100, deadline=None)
def test_reverting_all_hunks_gives_the_files_as_they_were(before, now):
    found = hunks(before, now)
    files = dict(now)
    for hunk in reversed(found):  # those behind first, so that places stay
        files = without(files, hunk, before)
    empty = {path: "" for path in {*before, *now}}
    assert empty | dict(files) == empty | before
    assert all(hunk.before != hunk.now for hunk in found)


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(SandboxConfig()) as pool:
        yield pool


def play(pool, *messages: str):
    tokenizer = Tokenizer.train([BROKEN] * 4, 300, Compact.SPECIAL_TOKENS)
    said = [message + "<|eot|>" for message in messages]
    return scripted.play(TASK, pool, tokenizer, LIMITS, *said, index=4)


def reviewed(pool, *trajectories):
    return list(review(TASK, trajectories, find_tools(), pool, LIMITS, verbose=False))


def test_needless_hunks_are_told_from_the_one_that_matters(pool):
    trajectory = play(pool, FIX, SPOIL, NEW, SUBMIT)
    assert trajectory.solved
    (found,) = reviewed(pool, trajectory)
    assert (found.task_id, found.index, found.cause) == ("two/0", 4, "")
    marks = {
        "\n".join(hunk.diff): needless
        for hunk, needless in zip(found.hunks, found.needless, strict=True)
    }
    assert marks == {
        "-import math\n+import os": True,
        "-    y = x - 1\n-    return y\n+    y = x + 1\n+    return y  # done": False,
        "+b = 3": True,
        "+note": True,
    }


def test_only_solved_work_is_reviewed_and_what_cannot_be_is_said(pool):
    solved = play(pool, FIX, SUBMIT)
    assert reviewed(pool, play(pool, SUBMIT)) == []
    # calls on record that no longer lead there, as after a change of a tool
    lost = dataclasses.replace(solved, turns=solved.turns[:2])
    spoiled = dataclasses.replace(solved, turns=(solved.turns[0], *solved.turns[3:]))
    causes = [one.cause for one in reviewed(pool, lost, spoiled)]
    assert causes == ["its calls hand in nothing", "its calls no longer solve the task"]
