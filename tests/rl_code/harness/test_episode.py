"""Episodes of agents of others: their programs really run, and their commands in the sandbox. What is
sampled is written by the test.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest

from rl_code.environment.frames import Rewritten
from rl_code.harness.agent import HarnessError
from rl_code.harness.harness import Harness
from rl_code.harness.program import Program
from tests.rl_code.harness.chats import (
    LIMITS,
    agent_episode,
    call,
    chat_tokenizer,
    minimal,
    say,
)

GOOD = "sed -i 's/return x/return [2 * y for y in x]/' lib/a.py"


@pytest.fixture
def play(task, sandboxes):
    """Starts an episode of a program; all of them are ended after the test."""
    opened = []

    def start(agent, **changes):
        harness = Harness(agent)
        opened.append(harness)
        episode = agent_episode(task, sandboxes, harness, **changes)
        opened.append(episode)
        return episode, episode.start()

    yield start
    for each in reversed(opened):
        each.close()


def text_of(tokens):
    return chat_tokenizer().decode(tokens)


def test_an_episode_is_graded_and_rewarded_like_our_own(play):
    episode, prompt = play(minimal())
    assert "f in lib/a.py must double" in text_of(prompt)
    answer = say(episode, call("cat lib/a.py"))
    assert "return x\nexit 0" in text_of(answer)
    assert text_of(say(episode, call(GOOD))).count("exit 0") == 1
    assert say(episode, call("submit")) is None
    trajectory = episode.finish()
    assert trajectory.status == "submitted" and trajectory.solved
    assert trajectory.reward.total == 1.0
    (context,) = trajectory.contexts
    assert trajectory.prompt_length == len(prompt)
    assert context.tokens[: len(prompt)].tolist() == prompt
    assert set(context.versions[context.sampled]) == {3}
    assert [turn.role for turn in trajectory.turns] == [
        "prompt",
        *["assistant", "tool"] * 2,
        "assistant",
    ]
    assert [c.arguments for turn in trajectory.turns for c in turn.calls] == [
        {"command": "cat lib/a.py"},
        {"command": GOOD},
        {"command": "submit"},
    ]


def test_what_was_sampled_is_never_tokenised_again(play, monkeypatch):
    episode, prompt = play(minimal())
    given = list(prompt)
    encoded = []
    tokenizer = chat_tokenizer()
    monkeypatch.setattr(
        type(tokenizer),
        "encode",
        lambda self, text: (
            encoded.append(text) or self._backend.encode(text, add_special_tokens=False).ids
        ),
    )
    for number in range(3):
        # one token for each letter, which is not how the tokenizer writes it
        tokens = [
            i for letter in call(f"echo mark{number}")[:-10] for i in tokenizer.encode(letter)
        ]
        tokens.append(tokenizer.eos_id)
        encoded.clear()
        answer = episode.step(tokens, [-0.5] * len(tokens), [0] * len(tokens))
        assert f"mark{number}" in text_of(answer) and not any(
            "echo mark" in each for each in encoded
        )
        given += tokens + answer
    assert episode.session.whole(0) == given
    episode.close()


def test_a_wrong_or_unfinished_work_is_not_solved(play):
    episode, _ = play(minimal())
    say(episode, call("echo nothing"))
    assert say(episode, call("submit")) is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.solved, trajectory.reward.total) == (
        "submitted",
        False,
        0.0,
    )


def test_a_history_that_the_agent_forgets_makes_a_tree(play):
    episode, prompt = play(minimal("tools", "forgetful"))
    first = say(episode, call("echo 1"))
    second = say(episode, call("echo 2"))
    assert isinstance(second, Rewritten) and second.context == 1
    assert "echo 1" not in text_of(second.tokens) and "echo 2" in text_of(second.tokens)
    third = say(episode, call("echo 3"))
    assert isinstance(third, Rewritten) and third.context == 2
    assert say(episode, call("submit")) is None
    trajectory = episode.finish()
    assert [context.parent for context in trajectory.contexts] == [-1, 0, 0]
    assert trajectory.contexts[1].kept > 0
    assert trajectory.whole(1).tolist()[: len(second.tokens)] == second.tokens
    whole = trajectory.whole(0).tolist()
    assert whole[: len(prompt)] == prompt and "echo 2" in text_of(whole)
    assert len(first) > 0
    # the message that the agent put into another context is text there, and was not sampled
    words = [text_of(c.tokens[c.sampled].tolist()) for c in trajectory.contexts]
    assert words == [call("echo 1") + call("echo 2"), call("echo 3"), call("submit")]


def test_a_message_without_a_call_is_the_agents_to_answer(play):
    episode, _ = play(minimal())
    assert "call bash" in text_of(say(episode, "hello<|im_end|>"))
    episode.close()
    assert episode._malformed_calls == 0


def test_limits_end_an_episode(play):
    two = dataclasses.replace(LIMITS, turns=2)
    episode, _ = play(minimal(), limits=two)
    say(episode, call("echo 1"))
    assert say(episode, call(GOOD)) is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.solved) == ("turn_limit", False)

    episode, prompt = play(minimal(), limits=two)
    short = dataclasses.replace(LIMITS, tokens=len(prompt) + 60)
    episode, _ = play(minimal(), limits=short)
    assert episode.budget == 60
    assert say(episode, call("printf %0300d 0")) is None
    assert episode.finish().status == "token_limit"

    waits = "import sys, time, subprocess; subprocess.run([sys.executable, *sys.argv[1:]]); time.sleep(900)"
    agent = Program(command=(sys.executable, "-c", waits, *minimal().command[1:]))
    episode, _ = play(agent)
    say(episode, call("echo 1"))
    # its time is up, whatever the machine does
    episode.limits = dataclasses.replace(LIMITS, tools_s=episode._calls.seconds)
    assert say(episode, call("submit")) is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.solved) == ("time_limit", False)


@pytest.mark.parametrize("silent", [1, 2])
def test_where_a_program_asks_for_nothing_another_one_is_started(task, sandboxes, silent):
    """silent: how many programs ask for nothing."""
    harness = Harness(minimal())
    episode = agent_episode(task, sandboxes, harness)
    started, ended = [], []
    real = harness.host.start

    def start(job, on_end):
        started.append(job.api_key)
        if len(started) <= silent:
            episode.limits = dataclasses.replace(LIMITS, tools_s=0.1)
            return lambda: ended.append(job.api_key)
        episode.limits = LIMITS
        return real(job, on_end)

    harness.host.start = start
    if silent == 1:
        episode.start()
        assert len(set(started)) == 2 and ended == started[:1]
        say(episode, call(GOOD))
        assert say(episode, call("submit")) is None
        assert episode.finish().solved
    else:
        with pytest.raises(HarnessError, match=r"asked for nothing within limits\.tools_s=0\.1"):
            episode.start()
        assert len(started) == 2 and set(ended) == set(started)
    episode.close()
    harness.close()


def test_an_agent_that_gives_up_has_handed_nothing_in(play):
    crash = "import sys; sys.argv = ['x']; exec(open({!r}).read().replace('return\\n', 'sys.exit(3)\\n'))"
    agent = Program(command=(sys.executable, "-c", crash.format(minimal().command[1])))
    episode, _ = play(agent)
    say(episode, call(GOOD))
    assert say(episode, call("submit")) is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.solved) == ("agent_ended", False)
    assert "exit code 3" in episode._cause


def test_a_program_that_the_machine_kills_is_a_fault_and_no_zero(play):
    """Its work is masked; that of one that crashes by itself is not (see above)."""
    dies = "import os, sys; sys.argv = ['x']; exec(open({!r}).read().replace('return\\n', 'os.kill(os.getpid(), 9)\\n'))"
    agent = Program(command=(sys.executable, "-c", dies.format(minimal().command[1])))
    episode, _ = play(agent)
    say(episode, call(GOOD))
    assert say(episode, call("submit")) is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.reward.flags) == ("fault", ("fault",))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("no_such_program",), "cannot be started"),
        ((sys.executable, "-c", "raise SystemExit('no model for me')"), "no model for me"),
        ((), "say which command"),
    ],
)
def test_a_program_that_asks_for_nothing_stops_the_run(play, command, message):
    with pytest.raises(HarnessError, match=message):
        play(Program(command=command))


def test_after_the_end_an_agent_is_told_so(play):
    episode, _ = play(minimal())
    url = episode._harness.url_of(episode._key)
    other = episode._harness.endpoint.url_of("no_key")
    episode.close()
    for base in (url, other):
        for path, body in (("chat/completions", {"messages": []}), ("execute", {"command": "ls"})):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"{base}/{path}", json.dumps(body).encode())
            assert caught.value.code == 401
            assert json.loads(caught.value.read())["error"]["code"] == "invalid_api_key"


def test_an_episode_cannot_be_forked(play):
    episode, _ = play(minimal())
    with pytest.raises(ValueError, match="program of others"):
        episode.fork(1)


def test_log_probabilities_stand_where_they_were_sampled(play):
    episode, _ = play(minimal())
    tokens = chat_tokenizer().encode(call("submit"))
    logprobs = [-0.1 * (at + 1) for at in range(len(tokens))]
    assert episode.step(tokens, logprobs, [5] * len(tokens)) is None
    (context,) = episode.finish().contexts
    np.testing.assert_allclose(context.logprobs[context.sampled], np.float32(logprobs))
    assert (context.logprobs[~context.sampled] == 0).all()
