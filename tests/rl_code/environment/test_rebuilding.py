"""Sandboxes that the machine loses cost no episode its reward; code that brings its sandbox down
gains nothing.
"""

from __future__ import annotations

import dataclasses

import pytest

from rl_code.environment.calls import TRIES
from rl_code.environment.sandbox.connection import Connection
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.types import Limits
from tests.rl_code.environment import scripted
from tests.rl_code.environment.sandbox.losses import kill, lose_runs, losing

CONFIG = SandboxConfig(workers=2, memory_mb=256, processes=16, cpu_s=20)
LIMITS = Limits(turns=6, tokens=900, turn_tokens=200, test_runs=3, command_s=20.0)
WRITE = "<|call|>write\ndef f(x):\n    return {}<|end|>"
RUN = "<|call|>run\n{}<|end|>"
TEST = "<|call|>test<|end|>"
SUBMIT = "<|call|>submit<|end|>"
GOOD = WRITE.format("[2 * y for y in x]")
BAD = WRITE.format("x")
# Episodes of a group: their messages, and whether they solve the task.
SCRIPTS = (
    ((BAD, TEST, GOOD, TEST, SUBMIT), True),
    ((RUN.format("echo 3 > notes.txt"), RUN.format("cat notes.txt"), GOOD, SUBMIT), True),
    ((BAD, TEST, SUBMIT), False),
    ((GOOD, RUN.format("echo 'f = None' >> solution.py"), TEST, SUBMIT), False),
)


@pytest.fixture(scope="module")
def sandboxes():
    with SandboxPool(CONFIG) as pool:
        yield pool


def play(task, sandboxes, tokenizer, messages):
    return scripted.play(task, sandboxes, tokenizer, LIMITS, *messages)


@pytest.mark.parametrize(
    ("chance", "seed"), [(0.05, 0), pytest.param(0.15, 1, marks=pytest.mark.long)]
)
def test_group_means_do_not_change_when_sandboxes_are_killed(
    task, sandboxes, tokenizer, monkeypatch, chance, seed
):
    """Each request to a sandbox may be its last."""
    episodes = [*SCRIPTS] * 3
    whole = [play(task, sandboxes, tokenizer, messages) for messages, _ in episodes]
    assert [one.solved for one in whole] == [solved for _, solved in episodes]
    with losing(monkeypatch, chance, seed) as killed:
        found = [play(task, sandboxes, tokenizer, messages) for messages, _ in episodes]
    assert killed and not any(one.rebuilt for one in whole)
    for one, other in zip(whole, found, strict=True):
        assert (one.status, one.reward, one.solved) == (other.status, other.reward, other.solved)
        # what the agent read is the same, token for token
        assert one.tokens.tolist() == other.tokens.tolist()


def test_a_rebuilt_workspace_has_what_all_messages_before_have_done(
    task, sandboxes, tokenizer, monkeypatch
):
    messages = (
        RUN.format("mkdir -p a/b; echo 1 > a/b/c; rm notes.txt"),
        GOOD,
        TEST,
        RUN.format("cat a/b/c; ls"),
        SUBMIT,
    )
    whole = play(task, sandboxes, tokenizer, messages)
    for at in range(3, 9):  # a loss before each of the later requests
        send, count = Connection.send, [0]

        def lose_once(connection, request, *args, send=send, count=count, at=at, **options):
            count[0] += 1
            if count[0] == at:
                kill(connection)
            return send(connection, request, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Connection, "send", lose_once)
            other = play(task, sandboxes, tokenizer, messages)
        assert other.tokens.tolist() == whole.tokens.tolist()
        assert other.solved and other.first_edit_passed == whole.first_edit_passed


@pytest.mark.long
def test_an_accident_late_in_an_episode_does_not_end_it(task, sandboxes, tokenizer, monkeypatch):
    """What is done again takes longer than the episode had left."""
    send, asked = Connection.send, []

    def lose_once(connection, request, *args, **options):
        asked.append(request["op"])
        if len(asked) == 3:  # after the files of the task, and the command
            kill(connection)
        return send(connection, request, *args, **options)

    monkeypatch.setattr(Connection, "send", lose_once)
    limits = dataclasses.replace(LIMITS, tools_s=10.0)
    messages = (RUN.format("sleep 6"), GOOD, SUBMIT)
    trajectory = scripted.play(task, sandboxes, tokenizer, limits, *messages)
    assert asked[:2] == ["write", "run"] and trajectory.rebuilt == 1
    assert trajectory.status == "submitted" and trajectory.solved


def test_code_that_kills_its_sandbox_fails_and_is_not_masked(task, sandboxes, tokenizer):
    """It does so in every try."""
    parent = "import os, signal\nfor pid in range(1, 400):\n"
    parent += "    try: os.kill(pid, 9)\n    except OSError: pass\n"
    command = RUN.format(f"python -c 'exec({parent!r})'; kill -9 -1; kill -9 1")
    trajectory = play(task, sandboxes, tokenizer, (BAD, command, SUBMIT))
    assert trajectory.status == "submitted" and trajectory.reward.total == 0.0


def test_a_sandbox_that_is_lost_in_every_try_is_the_candidates_failure(
    task, sandboxes, tokenizer, monkeypatch
):
    lost = lose_runs(monkeypatch, "exit 7")
    trajectory = play(task, sandboxes, tokenizer, (GOOD, RUN.format("sleep 3; exit 7"), SUBMIT))
    assert len(lost) == TRIES and trajectory.rebuilt == TRIES - 1
    assert trajectory.status == "submitted" and not trajectory.solved
    assert trajectory.reward.total == 0.0
