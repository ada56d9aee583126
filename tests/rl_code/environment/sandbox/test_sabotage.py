"""Episodes that attack their sandbox end as outcomes, and sabotage does not pay."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from rl_code.environment.calls import TRIES
from rl_code.environment.episode import Episode
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.sandbox.connection import Connection
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.evaluation import suite
from rl_code.types import Group, Limits
from tests.rl_code.environment.sandbox.processes import session_pid
from tests.rl_code.signals import rewarder

CONFIG = SandboxConfig(
    workers=1, memory_mb=256, processes=16, workspace_mb=4, cpu_s=2, output_bytes=4000
)
LIMITS = Limits(turns=4, tokens=2000, turn_tokens=900, test_runs=3, command_s=2.0)
GOOD = "def f(x):\n    return [2 * y for y in x]\n"
SUBMIT = "<|call|>submit<|end|>"
WRITE = f"<|call|>write\n{GOOD}<|end|>"

# What is left of a workspace after these is the agent's own to mend.
ATTACKS = {
    "limits of its supervisor": "python3 -c 'import resource as r\n"
    "for p in (1, 0):\n for k in range(16):\n  try: r.prlimit(p, k, (0, 0))\n  except Exception: 0'",
    "killing": "kill -9 1 -1; kill -STOP 1; kill -9 $PPID",
    "a fork bomb": "b() { b | b & }; b; b; sleep 9",
    "memory": "python3 -c 'import os\nfor i in range(9): os.fork()\nx = b\"x\" * (99 << 20); input()'",
    "a full disk": "head -c 99999999 /dev/zero > /tmp/z; head -c 99999999 /dev/zero > z; rm z",
    "no more files": 'python3 -c \'for i in range(9999): open(f"/tmp/{i}", "w")\'; touch {1..9999}; rm *',
    "depth": "mkdir -p $(printf 'd/%.0s' {1..499}); rm -rf d",
    "closed folders": "chmod 000 . /tmp /dev/shm",
    "a link for the file": "ln -sf /proc/1/mem solution.py; rm solution.py",
    "a pipe for the file": "rm solution.py; mkfifo solution.py; rm solution.py",
    "noise": "head -c 999999 /dev/urandom; yes $'\\377\\0'",
    "daemons": "(setsid bash -c 'while :; do echo x > solution.py; done' &) ; sleep 0.1",
    "timers and descriptors": "python3 -c 'import os, signal\nwhile 1: os.pipe()'; ulimit -n 0; ulimit -u 0",
}


@pytest.fixture(scope="module")
def sandboxes():
    with SandboxPool(CONFIG) as pool:
        yield pool


@pytest.fixture
def start(task, sandboxes, tokenizer):
    def start(index: int = 0) -> Play:
        episode = Episode(
            task,
            group=0,
            index=index,
            protocol=PROTOCOLS["compact"],
            tools=find_tools(),
            tokenizer=tokenizer,
            pool=sandboxes,
            limits=LIMITS,
            reward=rewarder("tests", {"name": "malformed", "weight": 0.25}),
        )
        episode.start()
        return Play(episode, tokenizer)

    return start


@dataclasses.dataclass
class Play:
    """An episode whose messages are written by hand."""

    episode: Episode
    tokenizer: object

    def say(self, message: str) -> None:
        tokens = self.tokenizer.encode(message + "<|eot|>")
        self.episode.step(tokens, [0.0] * len(tokens), [0] * len(tokens))


def kill_session(episode: Episode) -> None:
    """As an attack that nobody knows yet would."""
    os.kill(session_pid(episode._workspace.sandbox), signal.SIGKILL)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_an_outcome_and_honest_work_after_it_counts(start, attack):
    play = start()
    play.say(f"<|call|>run\n{ATTACKS[attack]}<|end|>")
    play.say(WRITE + SUBMIT)
    trajectory = play.episode.finish()
    assert trajectory.status == "submitted" and trajectory.reward.total == 1.0, trajectory.turns[2:]


def test_a_sandbox_that_is_brought_down_masks_nothing(start):
    play = start()
    play.say("<|call|>nonsense<|end|><|call|>run\ntrue<|end|>")
    kill_session(play.episode)
    play.say("<|call|>run\ntrue<|end|><|call|>test<|end|>")
    play.say(WRITE + SUBMIT)
    trajectory = play.episode.finish()
    assert trajectory.status != "fault" and "fault" not in trajectory.reward.flags
    # it may have been an accident, so the work counts, and so does what was malformed
    assert trajectory.malformed_calls == 1 and trajectory.reward.total == 0.75
    assert trajectory.rebuilt == 1


def test_a_command_that_brings_every_sandbox_down_fails_and_masks_nothing(start, monkeypatch):
    play = start()
    play.say("<|call|>nonsense<|end|><|call|>run\ntrue<|end|>")
    send = Connection.send

    def send_and_kill(connection, request, *args, **options):
        send(connection, request, *args, **options)
        if request["op"] == "run" and "kill all" in request["argv"][-1]:
            kill_session(play.episode)

    monkeypatch.setattr(Connection, "send", send_and_kill)
    play.say("<|call|>run\nsleep 5; kill all<|end|>")
    play.say(WRITE + SUBMIT)
    trajectory = play.episode.finish()
    assert trajectory.status == "submitted" and trajectory.rebuilt == TRIES - 1
    assert trajectory.malformed_calls == 1 and trajectory.reward.total == -0.25


def test_sabotaging_the_samples_that_fail_raises_no_pass_rate(start, task):
    def failing(index: int, *, sabotage: bool):
        play = start(index)
        play.say("<|call|>nonsense<|end|><|call|>run\ntrue<|end|>")
        if sabotage:
            kill_session(play.episode)
        play.say("<|call|>run\ntrue<|end|>" + SUBMIT)
        return play.episode.finish()

    play = start()
    play.say(WRITE + SUBMIT)
    solved = play.episode.finish()
    means, rewards = [], []
    for sabotage in (False, True):
        samples = (solved, *(failing(index, sabotage=sabotage) for index in (1, 2, 3)))
        result = suite.from_groups("s", "x", 0, {}, [Group(task, samples)])
        means.append(result.interval(1).mean)
        rewards.append([sample.reward.total for sample in samples])
    assert means == [0.25, 0.25] and rewards == [[1.0, *[-0.25] * 3]] * 2
