"""Sandboxes that the machine loses cost an agent of others no reward; a command that brings its
sandbox down gains nothing.
"""

from __future__ import annotations

import dataclasses

import pytest

from rl_code.environment.calls import TRIES
from rl_code.environment.sandbox.connection import Connection
from rl_code.environment.sandbox.pool import SandboxFault, SandboxPool
from rl_code.harness.harness import Harness
from tests.rl_code.environment.sandbox.losses import kill, lose_runs, losing
from tests.rl_code.harness.chats import LIMITS, agent_episode, call, minimal, say

GOOD = "sed -i 's/return x/return [2 * y for y in x]/' lib/a.py"
# Episodes of a group: their commands, and whether they solve the task.
SCRIPTS = (
    (("cat lib/a.py", GOOD, "cat lib/a.py"), True),
    (("echo 3 > three.txt; mkdir -p a/b", GOOD, "cat three.txt; ls a"), True),
    (("echo nothing", "cat notes.txt"), False),
    ((GOOD, "echo 'f = None' >> lib/a.py", "cat lib/a.py"), False),
)


@pytest.fixture(scope="module")
def harness():
    harness = Harness(minimal())
    yield harness
    harness.close()


@pytest.fixture
def start(task, sandboxes, harness):
    """Starts an episode; all of them are ended after the test."""
    opened = []

    def start(**changes):
        episode = agent_episode(task, sandboxes, harness, **changes)
        opened.append(episode)
        episode.start()
        return episode

    yield start
    for episode in opened:
        episode.close()


def play(start, commands):
    """A whole episode of these commands, which then hands in."""
    episode = start()
    for command in commands:
        say(episode, call(command))
    assert say(episode, call("submit")) is None
    return episode.finish()


def lose_before(monkeypatch, at: int) -> list[str]:
    """Kills the sandbox before one of its requests, counted from 1; what all were, in order."""
    send, asked = Connection.send, []

    def send_or_lose(connection, request, *args, **options):
        asked.append(request["op"])
        if len(asked) == at:
            kill(connection)
        return send(connection, request, *args, **options)

    monkeypatch.setattr(Connection, "send", send_or_lose)
    return asked


@pytest.mark.long
def test_group_means_do_not_change_when_sandboxes_are_killed(start, monkeypatch):
    """Each request to a sandbox may be its last."""
    episodes = [*SCRIPTS] * 3
    whole = [play(start, commands) for commands, _ in episodes]
    assert [one.solved for one in whole] == [solved for _, solved in episodes]
    with losing(monkeypatch, 0.15, seed=1) as killed:
        found = [play(start, commands) for commands, _ in episodes]
    assert killed and not any(one.rebuilt for one in whole)
    assert any(one.rebuilt for one in found)
    for one, other in zip(whole, found, strict=True):
        assert (one.status, one.reward, one.solved) == (other.status, other.reward, other.solved)
        # what the agent read is the same, token for token
        assert one.whole(0).tolist() == other.whole(0).tolist()


@pytest.mark.parametrize("at", [2, 3, 4, 5])
def test_a_rebuilt_sandbox_has_what_all_commands_before_have_done(start, monkeypatch, at):
    """at: before which request it is lost: one of the commands, or the snapshot."""
    with monkeypatch.context() as patch:
        asked = lose_before(patch, at)
        trajectory = play(start, SCRIPTS[1][0])
    # the files of the task, the commands, and the files handed in
    assert asked[:at] == ["write", "run", "run", "run", "snapshot"][:at]
    assert trajectory.rebuilt == 1 and trajectory.solved
    assert trajectory.status == "submitted" and trajectory.reward.total == 1.0
    assert trajectory.reward.flags == ()


def test_a_command_that_brings_every_sandbox_down_fails_and_masks_nothing(start, monkeypatch):
    lost = lose_runs(monkeypatch, "exit 7")
    trajectory = play(start, (GOOD, "sleep 3; exit 7"))
    assert len(lost) == TRIES and trajectory.rebuilt == TRIES - 1
    assert (trajectory.status, trajectory.solved) == ("submitted", False)
    assert trajectory.reward.total == 0.0 and trajectory.reward.flags == ()


def test_a_machine_without_sandboxes_is_a_fault_and_no_zero(start, monkeypatch):
    """It loses one, and can start no other."""
    episode = start()
    say(episode, call(GOOD))
    kill(episode._workspace.sandbox._connection)

    def fail(*args, **options):
        raise SandboxFault("no sandbox can be started")

    monkeypatch.setattr(SandboxPool, "open", fail)
    assert say(episode, call("cat lib/a.py")) is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.reward.flags) == ("fault", ("fault",))


def test_a_fault_while_it_is_built_again_leaves_no_half_of_the_work(start, monkeypatch):
    """The fault passes, so the next try has everything."""
    episode = start()
    say(episode, call(GOOD))
    kill(episode._workspace.sandbox._connection)
    open_one, failed = SandboxPool.open, []

    def fail_once(pool, *args, **options):
        if not failed:
            failed.append(pool)
            raise SandboxFault("no sandbox can be started")
        return open_one(pool, *args, **options)

    monkeypatch.setattr(SandboxPool, "open", fail_once)
    say(episode, call("cat lib/a.py"))
    assert say(episode, call("submit")) is None
    trajectory = episode.finish()
    assert failed and trajectory.rebuilt == 2 and trajectory.solved


@pytest.mark.long
def test_an_accident_late_in_an_episode_does_not_end_it(start):
    """What is done again takes longer than the episode had left."""
    episode = start()
    say(episode, call("sleep 6"))
    say(episode, call(GOOD))
    kill(episode._workspace.sandbox._connection)
    limits = dataclasses.replace(LIMITS, tools_s=episode._calls.seconds + 5)
    episode.limits = episode._calls._limits = limits
    say(episode, call("echo checked"))
    assert say(episode, call("submit")) is None
    trajectory = episode.finish()
    assert trajectory.rebuilt == 1 and trajectory.solved
