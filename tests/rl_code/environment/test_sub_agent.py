"""Sub-agents in an episode: what they begin with, what comes back, how they end, what is recorded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.episode import Episode
from rl_code.environment.frames import Elsewhere
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.protocols.chat import Chat
from rl_code.environment.tools.api import find_tools
from rl_code.store import serialization
from rl_code.types import Group
from tests.rl_code.signals import rewarder

GOOD = "def f(x):\n    return [2 * y for y in x]\n"
NAMES = ("write_file", "read_file", "submit")
ASK = "<|call|>ask\nWhat is in a.py?<|end|>"
READ = "<|call|>read a.py<|end|>"
SUBMIT = "<|call|>submit<|end|>"


@pytest.fixture
def make(task, pool, limits, tokenizer):
    def make(protocol="compact", more=(), **settings) -> Episode:
        tools = find_tools((*map(Named, NAMES), Named("sub_agent", settings)))
        return Episode(
            dataclasses.replace(task, files={**task.files, "a.py": "x = 3"}, tools=None),
            group=5,
            index=2,
            protocol=PROTOCOLS.get(protocol, protocol),
            tools=tools,
            tokenizer=tokenizer,
            pool=pool,
            limits=dataclasses.replace(limits, **{"tokens": 2000, **dict(more)}),
            reward=rewarder(),
        )

    return make


def say(episode, tokenizer, text, version=7):
    """Plays one message; (the context of what follows, its text with marks quoted), or None."""
    tokens = tokenizer.encode(f"{text}<|eot|>")
    answer = episode.step(tokens, [-0.5] * len(tokens), [version] * len(tokens))
    if isinstance(answer, Elsewhere):
        return answer.context, tokenizer.decode_quoted(answer.tokens)
    return answer and (episode._frame.number, tokenizer.decode_quoted(answer))


def test_a_question_is_answered_in_a_context_of_its_own(make, tokenizer):
    episode = make()
    prompt = episode.start()
    asked = say(episode, tokenizer, ASK + f"<|call|>write\n{GOOD}<|end|>")
    assert asked == (1, "<|bos|>What is in a.py?<|eot|>")
    assert say(episode, tokenizer, READ) == (1, "<|tool|>x = 3<|eot|>")
    # it answers by a message without a call; the call behind the question comes after that
    assert say(episode, tokenizer, "x is 3") == (0, "<|tool|>x is 3\nok<|eot|>")
    assert say(episode, tokenizer, SUBMIT) is None
    trajectory = episode.finish()
    assert trajectory.solved and trajectory.malformed_calls == 0
    _, child = trajectory.contexts
    assert trajectory.prompt_length == len(prompt)
    assert (child.parent, child.kept) == (-1, 0)
    assert tokenizer.decode(child.tokens[child.sampled]) == READ + "<|eot|>x is 3<|eot|>"
    texts = [(turn.context, turn.role, turn.text) for turn in trajectory.turns]
    assert texts[0][:2] == (0, "prompt") and texts[5][:2] == (1, "prompt")
    for turn in trajectory.turns:
        span = trajectory.contexts[turn.context].tokens[turn.start : turn.end]
        assert tokenizer.decode(span) == turn.text
    # all of it is on record, and comes back from it
    group = Group(episode.task, (trajectory,))
    read = serialization.loads(serialization.dumps(group))
    assert len(read.trajectories[0].contexts) == 2
    np.testing.assert_array_equal(read.trajectories[0].tokens, trajectory.tokens)


def test_one_that_uses_up_its_turns_gives_back_its_last_message(make, tokenizer):
    episode = make(turns=2)
    episode.start()
    say(episode, tokenizer, ASK)
    assert say(episode, tokenizer, READ)[0] == 1
    context, text = say(episode, tokenizer, READ)
    assert context == 0
    assert "read a.py" in text and "<|call|>" not in text  # plain text, as in any answer
    assert say(episode, tokenizer, ASK)[0] == 2
    assert say(episode, tokenizer, "done")[0] == 0
    episode.close()


def test_it_has_neither_submit_nor_sub_agents_and_malformed_calls_count(make, tokenizer):
    episode = make()
    episode.start()
    say(episode, tokenizer, ASK)
    for text in (SUBMIT, ASK):
        context, answer = say(episode, tokenizer, text)
        assert context == 1 and "unknown" in answer
    assert not episode.over
    say(episode, tokenizer, "no")
    say(episode, tokenizer, SUBMIT)
    assert episode.finish().malformed_calls == 2


def test_its_files_are_those_of_the_episode(make, tokenizer):
    episode = make()
    episode.start()
    say(episode, tokenizer, ASK)
    say(episode, tokenizer, f"<|call|>write\n{GOOD}<|end|>")
    say(episode, tokenizer, "it is written")
    say(episode, tokenizer, SUBMIT)
    assert episode.finish().solved


def test_tokens_are_bounded_by_its_own_limit_and_the_episodes(make, tokenizer):
    episode = make(tokens=60)
    episode.start()
    say(episode, tokenizer, ASK)
    while episode._frame.number:
        tokens = tokenizer.encode(READ + "<|eot|>")[: episode.budget]
        assert tokens
        episode.step(tokens, [0.0] * len(tokens), [1] * len(tokens))
    assert len(episode._frames.all[1].transcript) <= 60
    short = make(tokens=5)
    short.start()
    assert say(short, tokenizer, ASK) == (0, "<|tool|>no tokens are left for it<|eot|>")
    for limit in range(80, 240, 7):
        episode = make(more={"tokens": limit})
        try:
            episode.start()
        except ValueError:
            continue
        while not episode.over:
            text = ASK if not episode._frame.number else READ
            tokens = tokenizer.encode(text + "<|eot|>")[: episode.budget]
            assert tokens
            episode.step(tokens, [0.0] * len(tokens), [1] * len(tokens))
        trajectory = episode.finish()
        assert trajectory.num_tokens <= limit
        assert trajectory.sampled.sum() <= 4 * 120


def test_the_time_and_the_turns_of_the_episode_end_it(make, tokenizer):
    episode = make(more={"tools_s": 1e-9})
    episode.start()
    assert say(episode, tokenizer, ASK) is None
    assert episode.finish().status == "time_limit"
    episode = make(more={"turns": 1})
    episode.start()
    assert say(episode, tokenizer, ASK)[0] == 1
    assert say(episode, tokenizer, "yes") is None
    trajectory = episode.finish()
    assert trajectory.status == "turn_limit"
    assert [turn.results[0].content for turn in trajectory.turns if turn.results] == ["yes"]


def test_a_thought_that_never_ends_is_neither_a_call_nor_an_answer(make, tokenizer):
    chat = Chat("qwen2", "json", stop_tokens=("<|eot|>",))
    episode = make(chat, {"tokens": 20_000, "turn_tokens": 200}, tokens=9_000)
    episode.start()
    ask = '<tool_call>{"name": "sub_agent", "arguments": {"question": "x?"}}</tool_call>'
    write = '<tool_call>{"name": "write_file", "arguments": {"path": "a.py", "content": ""}}'
    maybe = f"<think>maybe {write}</tool_call> but no"
    context, said = say(episode, tokenizer, maybe)
    assert context == 0 and "the thought never ends" in said
    assert say(episode, tokenizer, ask)[0] == 1
    context, said = say(episode, tokenizer, maybe)
    assert context == 1 and "the thought never ends" in said
    context, said = say(episode, tokenizer, "<think>hm</think>It is 3.")
    assert context == 0 and "It is 3." in said
    say(episode, tokenizer, '<tool_call>{"name": "submit"}</tool_call>')
    trajectory = episode.finish()
    assert trajectory.malformed_calls == 2 and trajectory.status == "submitted"
    assert [call.name for turn in trajectory.turns for call in turn.calls if not call.error] == [
        "sub_agent",
        "submit",
    ]


def test_an_episode_that_waits_is_not_forked(make, tokenizer):
    episode = make()
    episode.start()
    say(episode, tokenizer, ASK)
    with pytest.raises(ValueError, match="a sub-agent is at work"):
        episode.fork(3)
    say(episode, tokenizer, "yes")
    fork = episode.fork(3)
    say(fork, tokenizer, SUBMIT)
    assert len(fork.finish().contexts) == 2
    assert not episode.over


@pytest.mark.parametrize(
    ("protocol", "call", "answer"),
    [
        ("hermes", '<tool_call>{"name": "f"}', "<think><tool_call></think>It is 3."),
        ("qwen3_coder", "<tool_call>\n<function=f>", "It is 3."),
        ("llama3", '{"name": 3', "It is {3}."),
        ("hermes", "<tool_call>submit</tool_call>", "Calls stand behind <tool_call> there."),
        ("hermes", "I call <tool_call>", "It is `<tool_call>`, then `</tool_call>`."),
        ("qwen3_coder", "<tool_call>\n<func", "Calls stand behind <tool_call> there."),
        ("compact", "<|call|>", "It is 3."),
    ],
)
def test_what_is_an_answer(protocol, call, answer):
    assert PROTOCOLS[protocol].has_call(call)
    assert not PROTOCOLS[protocol].has_call(answer)


def test_settings_that_cannot_be():
    for settings in ({"turns": 0}, {"tokens": 1}):
        with pytest.raises(ConfigError, match="at least"):
            find_tools((Named("sub_agent", settings),))
