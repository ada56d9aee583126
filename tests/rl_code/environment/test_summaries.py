"""Summaries in an episode: when one is asked for, what its next context begins with, how it ends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rl_code.config.named import Named
from rl_code.environment.asked import Asked
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.episode import Episode
from rl_code.environment.frames import Elsewhere, Summarised
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.summaries import LEFT_OUT, Closing, SummariesConfig, closing_of
from rl_code.environment.tools.api import find_tools
from rl_code.learner.examples import examples_of
from rl_code.store import serialization
from rl_code.types import Group, ToolResult
from tests.rl_code.signals import rewarder

GOOD = "def f(x):\n    return [2 * y for y in x]\n"
NAMES = ("write_file", "read_file", "sub_agent", "submit")
WRITE = f"<|call|>write\n{GOOD}<|end|>"
READ = "<|call|>read a.py<|end|>"
SUBMIT = "<|call|>submit<|end|>"
SETTINGS = SummariesConfig(trigger=200, context=400, tokens=60, request="sum up", go_on="go on")


@pytest.fixture
def make(task, pool, limits, tokenizer):
    def make(
        summaries=SETTINGS, a="x = 3", documents=None, more=(), closing=None, **changes
    ) -> Episode:
        return Episode(
            dataclasses.replace(task, files={**task.files, "a.py": a}, tools=None, **changes),
            group=5,
            index=2,
            protocol=PROTOCOLS["compact"],
            tools=find_tools(tuple(map(Named, NAMES))),
            tokenizer=tokenizer,
            pool=pool,
            limits=dataclasses.replace(limits, **{"tokens": 2000, "turns": 8, **dict(more)}),
            reward=rewarder(),
            asked=Asked(documents, summaries, closing),
        )

    return make


def say(episode, tokenizer, text, version=7, *, end="<|eot|>"):
    """Plays one message; (its tokens, what ``step`` gives)."""
    tokens = tokenizer.encode(f"{text}{end}")
    return tokens, episode.step(tokens, [-0.5] * len(tokens), [version] * len(tokens))


def told(tokenizer, tokens):
    return tokenizer.decode_quoted(tokens)


def until_asked(episode, tokenizer, most=20):
    """Reads a file until a summary is due."""
    for _ in range(most):
        _, answer = say(episode, tokenizer, READ)
        if episode._frame.summary_due:
            return told(tokenizer, answer)
    raise AssertionError("no summary was asked for")


def test_the_next_context_is_the_prompt_and_the_summarys_own_tokens(make, tokenizer):
    episode = make()
    prompt = episode.start()
    trigger = len(prompt) + len(tokenizer.encode(READ + "<|eot|>")) + 10
    episode = make(dataclasses.replace(SETTINGS, trigger=trigger, most=1))
    assert episode.start() == prompt
    assert until_asked(episode, tokenizer) == "<|tool|>x = 3\nsum up<|eot|>"
    assert episode.budget == SETTINGS.tokens
    # the calls of a summary are not carried out
    summary, there = say(episode, tokenizer, f"a.py has x {SUBMIT}", version=8)
    assert isinstance(there, Summarised) and there.whole and there.context == 1
    go_on = tokenizer.encode("<|tool|>go on<|eot|>")
    assert there.tokens == [*prompt, *summary, *go_on]
    assert not episode.over and episode.budget > SETTINGS.tokens
    say(episode, tokenizer, WRITE)
    assert say(episode, tokenizer, SUBMIT)[1] is None
    trajectory = episode.finish()
    assert trajectory.solved and trajectory.malformed_calls == 0
    first, second = trajectory.contexts
    assert (second.parent, second.kept) == (0, len(prompt)) == (0, trajectory.prompt_length)
    np.testing.assert_array_equal(trajectory.whole(1)[: len(there.tokens)], there.tokens)
    # the summary was sampled once, in the context that it ends
    np.testing.assert_array_equal(first.tokens[-len(summary) :], summary)
    assert first.sampled[-len(summary) :].all() and set(first.versions[-len(summary) :]) == {8}
    assert not second.sampled[: len(summary) + len(go_on)].any()
    assert trajectory.num_tokens == len(first.tokens) + len(second.tokens)
    for turn in trajectory.turns:
        span = trajectory.contexts[turn.context].tokens[turn.start : turn.end]
        assert tokenizer.decode(span) == turn.text
    read = serialization.loads(serialization.dumps(Group(episode.task, (trajectory,))))
    np.testing.assert_array_equal(read.trajectories[0].whole(1), trajectory.whole(1))
    assert read.trajectories[0].contexts[1].parent == 0


@pytest.mark.parametrize("kind", ["empty", "cut"])
def test_a_summary_that_is_empty_or_cut_is_an_outcome(make, tokenizer, kind):
    episode = make(dataclasses.replace(SETTINGS, trigger=1, context=1000, tokens=5))
    prompt = episode.start()
    until_asked(episode, tokenizer, 1)
    stop = tokenizer.encode("<|eot|>")
    if kind == "empty":
        summary, there = say(episode, tokenizer, "")
        assert summary == stop
    else:
        summary = tokenizer.encode("a b c d e f g h i j")[: episode.budget]
        assert len(summary) == 5
        there = episode.step(summary, [-0.5] * 5, [7] * 5)
    closing = [] if kind == "empty" else stop
    go_on = tokenizer.encode("<|tool|>go on<|eot|>")
    assert there.tokens == [*prompt, *summary, *closing, *go_on]
    # nothing is asked for again, and the next message is one of work
    assert not episode._frame.summary_due and episode.budget > 5
    say(episode, tokenizer, WRITE)
    assert episode._frame.summary_due  # of the next context, which is at the trigger too
    episode.close()


def test_no_more_summaries_than_the_config_says_and_turns_are_those_of_work(make, tokenizer):
    settings = dataclasses.replace(SETTINGS, trigger=1, context=1000, most=2)
    episode = make(settings, more={"turns": 4})
    episode.start()
    for _ in range(2):
        say(episode, tokenizer, READ)
        assert say(episode, tokenizer, "s")[1].whole
    assert isinstance(say(episode, tokenizer, READ)[1], list)
    assert not episode._frame.summary_due
    assert say(episode, tokenizer, READ)[1] is None
    trajectory = episode.finish()
    assert trajectory.status == "turn_limit"
    assert [(one.parent, one.kept) for one in trajectory.contexts] == [
        (-1, 0),
        (0, trajectory.prompt_length),
        (1, trajectory.prompt_length),
    ]
    episode = make(dataclasses.replace(settings, most=0))
    episode.start()
    assert isinstance(say(episode, tokenizer, READ)[1], list)
    assert not episode._frame.summary_due
    # after the last turn of work no summary is asked for
    episode = make(settings, more={"turns": 1})
    episode.start()
    assert say(episode, tokenizer, READ)[1] is None and episode.status == "turn_limit"
    episode.close()


def test_contexts_and_the_episode_keep_within_their_limits(make, tokenizer):
    for total in range(150, 900, 37):
        settings = SummariesConfig(120, context=180, tokens=20, most=3, request="sum up")
        episode = make(settings, "x = 3\n" * 10, more={"tokens": total})
        episode.start()
        while not episode.over:
            text = "a b c d e f" if episode._frame.summary_due else READ
            tokens = tokenizer.encode(text + "<|eot|>")[: episode.budget]
            assert tokens
            episode.step(tokens, [0.0] * len(tokens), [1] * len(tokens))
        trajectory = episode.finish()
        assert trajectory.num_tokens <= total
        wholes = [len(trajectory.whole(index)) for index in range(len(trajectory.contexts))]
        assert max(wholes) <= 180
        if total > 600:
            assert len(wholes) > 1


def test_a_result_that_does_not_fit_is_left_out(make, tokenizer):
    settings = SummariesConfig(trigger=100, context=180, tokens=20, request="sum up")
    episode = make(settings, "y = [1, 2, 3]\n" * 40)
    episode.start()
    assert until_asked(episode, tokenizer, 1) == f"<|tool|>{LEFT_OUT}\nsum up<|eot|>"
    (result,) = episode._frame.transcript.turns[-1].results
    assert (result.name, result.content, result.ok) == ("read_file", LEFT_OUT, True)
    assert isinstance(say(episode, tokenizer, "s")[1], Summarised)
    # without summaries it ends the episode
    episode = make(None, "y = [1, 2, 3]\n" * 40, more={"tokens": 180})
    episode.start()
    assert say(episode, tokenizer, READ)[1] is None and episode.status == "token_limit"


def test_sub_agents_are_not_summarised_and_answer_to_the_context_that_asked(make, tokenizer):
    episode = make(dataclasses.replace(SETTINGS, trigger=1, context=1000, most=1))
    episode.start()
    say(episode, tokenizer, READ)
    say(episode, tokenizer, "s")
    _, asked = say(episode, tokenizer, "<|call|>ask\nWhat is x?<|end|>")
    assert type(asked) is Elsewhere and asked.context == 2
    with pytest.raises(ValueError, match="a sub-agent is at work"):
        episode.fork(3)
    _, answer = say(episode, tokenizer, "3")
    assert answer.context == 1 and told(tokenizer, answer.tokens) == "<|tool|>3<|eot|>"
    fork = episode.fork(3)
    for one in (fork, episode):
        say(one, tokenizer, SUBMIT)
    parents = [[c.parent for c in one.finish().contexts] for one in (fork, episode)]
    assert parents == [[-1, 0, -1]] * 2


def test_a_task_that_begins_a_message_has_no_summaries(make, tokenizer):
    episode = make(dataclasses.replace(SETTINGS, trigger=1), prefill="<|call|>read a.py")
    episode.start()
    say(episode, tokenizer, "<|end|>")
    assert not episode._frame.summary_due
    episode.close()


def test_documents_of_the_prompt_are_kept_and_later_ones_are_counted_on(make, tokenizer):
    parts = (
        {"type": "text", "text": "Mend it.\n"},
        {"type": "document", "text": "def f(): ..."},
        {"type": "text", "text": "\nNow."},
    )
    documents = DocumentsConfig(longest=64, shortest=2, page=16)
    settings = dataclasses.replace(SETTINGS, trigger=1, context=1000)
    episode = make(settings, documents=documents, messages=({"role": "user", "content": parts},))
    prompt = episode.start()
    kinds = list(episode.documents)
    say(episode, tokenizer, READ)
    _, there = say(episode, tokenizer, "s")
    assert there.tokens[: len(prompt)] == prompt
    assert episode.documents[: len(prompt)] == kinds and len(episode.documents) == len(there.tokens)
    assert set(episode.documents[len(prompt) :]) == {0}
    say(episode, tokenizer, READ)
    assert max(episode.documents) == 2  # the result, behind the document of the prompt
    say(episode, tokenizer, "s")
    say(episode, tokenizer, SUBMIT)
    trajectory = episode.finish()
    for index, context in enumerate(trajectory.contexts):
        assert len(trajectory.whole_documents(index)) == len(trajectory.whole(index))
        assert len(context.documents) == len(context.tokens)
    group = Group(episode.task, (trajectory,))
    way = dict(drop_uninformative=False, max_staleness=[0], version=7, documents=documents)
    (((example,),), _, _) = examples_of([group], [[1.0]], **way)
    assert example.targets == trajectory.sampled.sum()


def test_an_episode_that_is_over_may_be_asked_for_a_last_message(make, tokenizer):
    closing = Closing(9, "what to keep?")
    for last, status in ((SUBMIT, "submitted"), (READ, "turn_limit")):
        episode = make(None, closing=closing, more={"turns": 2})
        episode.start()
        say(episode, tokenizer, WRITE)
        _, asked = say(episode, tokenizer, last)
        assert told(tokenizer, asked).endswith("\nwhat to keep?<|eot|>") and not episode.over
        assert episode.budget == 9
        assert say(episode, tokenizer, "x is 3")[1] is None
        trajectory = episode.finish()
        assert trajectory.status == status and trajectory.solved == (status == "submitted")
        assert closing_of(trajectory).text == "x is 3<|eot|>"
        assert trajectory.contexts[0].sampled[-1]
    # behind a summary, the message stands in the last context
    episode = make(dataclasses.replace(SETTINGS, trigger=1, context=1000, most=1), closing=closing)
    episode.start()
    say(episode, tokenizer, WRITE)
    say(episode, tokenizer, "s")
    say(episode, tokenizer, SUBMIT)
    say(episode, tokenizer, "")
    assert closing_of(episode.finish()).context == 1
    # no room, no request, another end
    episode = make(None, closing=Closing(9, "why? " * 400))
    episode.start()
    assert say(episode, tokenizer, SUBMIT)[1] is None
    assert closing_of(episode.finish()) is None
    episode = make(None, closing=closing, more={"tools_s": 1e-9})
    episode.start()
    assert say(episode, tokenizer, READ)[1] is None and episode.status == "time_limit"
    assert closing_of(episode.finish()) is None


@pytest.mark.parametrize("protocol", ["hermes", "qwen3_coder", "llama3", "compact"])
def test_every_protocol_of_calls_writes_a_request(protocol):
    one = PROTOCOLS[protocol]
    results = [ToolResult("read_file", "x = 3")]
    text = one.requested(results, "sum up")
    assert text.index("x = 3") < text.index("sum up")
    assert text.startswith(one.observation(results)[:8])
    assert "sum up" in one.requested([], "sum up")


def test_settings_that_cannot_be():
    for settings in ({"trigger": 0}, {"tokens": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            dataclasses.replace(SETTINGS, **settings)
    with pytest.raises(ValueError, match="no room for a summary"):
        SummariesConfig(trigger=100, context=120, tokens=30)
    with pytest.raises(ValueError, match="must ask for a summary"):
        SummariesConfig(trigger=100, request=" ")
