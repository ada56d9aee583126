"""Cheats on the rewards of others' environments: a stand-in for verifiers that looks for the answer
anywhere in a message pays for every number, and one that compares it pays for nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rl_code.config.named import Named
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.harness.harness import Harness
from rl_code.harness.verifiers import Verifiers
from rl_code.redteam import environments, foreign
from rl_code.redteam.foreign import NOTHING
from rl_code.tasks.api import find_source

STAND_IN = Path(__file__).parents[1] / "harness" / "environments" / "stand_in"


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """Attempts at one task of a taskset that searches, and of one that breaks."""
    python = tmp_path_factory.mktemp("python") / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{STAND_IN}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    found = {}
    harness = Harness(Verifiers())
    pool = SandboxPool(SandboxConfig(workers=1))
    for does in ("search", "TaskError"):
        settings = dict(
            taskset="sums", python=str(python), env=dict(taskset=dict(does=does, rows=1))
        )
        (task,) = find_source(Named("verifiers", settings), "--verifiers").load(None, None)
        found[does] = list(environments.tried(task, does, pool, harness))
    harness.close()
    pool.close()
    return found


def test_a_reward_that_searches_pays_for_what_says_everything(attempts):
    own = attempts["search"]
    # an honest failure earns 0.25 here, and 1 is the first number that "0 + 1 = ?" asks for
    assert [one.earned for one in own if one.attempt == NOTHING] == [0.25]
    paid = {one.attempt for one in own if one.paid}
    assert paid == {"the task said again", "every number", "many answers, each in its form"}
    assert {one.attempt for one in own if one.is_cheat} == {one.name for one in environments.CHEATS}


def test_a_reward_that_fails_pays_nobody_and_says_so(attempts):
    own = attempts["TaskError"]
    assert not any(one.paid for one in own)
    assert all(one.flags == ("failed",) and one.earned == 0.0 for one in own)


def test_tables_rank_tasksets_and_say_how_to_close_them(attempts):
    every = [one for own in attempts.values() for one in own]
    head, *rows = foreign.ranked(every)
    assert head[:2] == ["grader", "cheats paid"]
    assert [row[:2] for row in rows] == [["TaskError", "0 of 14"], ["search", "3 of 14"]]
    said = [(one.name, one.close) for one in environments.CHEATS]
    lines = {line[0]: line[1:] for line in foreign.by_cheat(every, said)}
    numbers = environments.CHEATS[2]
    assert lines[numbers.name] == ["1 of 1", "0 of 1", numbers.close]
