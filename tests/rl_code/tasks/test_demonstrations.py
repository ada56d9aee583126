"""Demonstrations: an episode's own text, imperfect by as much as configured, within the limits."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokenizer import Tokenizer
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.tools.api import find_tools
from rl_code.tasks.demonstrations import DemonstrationConfig, Segment, demonstrate
from rl_code.tasks.generated import generate
from rl_code.types import Limits, Task

LIMITS = Limits(turns=5, tokens=400, turn_tokens=80, test_runs=3, command_s=5.0)
IMPERFECT = DemonstrationConfig(p_right=0.4, p_test=0.7, p_give_up=0.3)
PROTOCOL = Compact()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ["".join(segment.text for segment in segments) for _, segments in some(IMPERFECT, 1000)]
    return Tokenizer.train(texts, 512, Compact.SPECIAL_TOKENS)


@functools.cache
def one(config, index, levels, limits):
    task = generate("train", 3, index, levels)
    return task, demonstrate(task, random.Random(index), config, limits)


def some(config, count, levels=(1, 2), limits=LIMITS):
    return [one(config, index, levels, limits) for index in range(count)]


def message_calls(task, segment):
    return PROTOCOL.parse(segment.text.removesuffix("<|eot|>"), task, find_tools())


def attempts(task, segments):
    calls = [
        call for segment in segments if segment.sampled for call in message_calls(task, segment)
    ]
    return [call.arguments["content"] for call in calls if call.name == "write_file"]


def right(task, text):
    names: dict = {}
    exec(text, names)
    try:
        return all(names["f"](*case.args) == case.expected for case in task.visible_tests.cases)
    except (IndexError, TypeError, ValueError):
        return False


@settings(deadline=None)
@given(
    st.integers(0, 10**4),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from([1, 2, 3, 4, 5]),
)
def test_demonstrations_keep_to_turns_and_runs_and_end_by_submitting(
    index, p_right, p_test, p_give_up, turns, runs, level
):
    task = generate("train", 1, index, (level,))
    limits = Limits(turns=turns, tokens=400, turn_tokens=80, test_runs=runs, command_s=5.0)
    segments = demonstrate(
        task, random.Random(index), DemonstrationConfig(p_right, p_test, p_give_up), limits
    )
    assert segments[0] == Segment(PROTOCOL.prompt(task, find_tools()), False)
    assert [segment.sampled for segment in segments] == [i % 2 == 1 for i in range(len(segments))]
    messages = [message_calls(task, segment) for segment in segments[1::2]]
    assert len(messages) <= turns
    calls = [call for message in messages for call in message]
    assert not any(call.error for call in calls)
    names = [call.name for call in calls]
    assert names[0] == "write_file" and names[-1] == "submit" and names.count("submit") == 1
    assert names.count("run_tests") <= runs


def test_no_attempt_is_made_twice_nor_repeats_the_file_given():
    for task, segments in some(DemonstrationConfig(p_right=0.2, p_test=1.0, p_give_up=0.0), 300):
        texts = [task.files[task.path], *attempts(task, segments)]
        assert len(set(texts)) == len(texts)


def test_attempts_are_right_as_often_as_configured():
    firsts = [right(task, attempts(task, segments)[0]) for task, segments in some(IMPERFECT, 500)]
    assert (
        0.36 < sum(firsts) / len(firsts) < 0.52
    )  # some mistakes change nothing that the tests see


def test_a_perfect_demonstration_tests_once_and_submits():
    for task, segments in some(
        DemonstrationConfig(p_right=1.0, p_test=1.0, p_give_up=1.0), 50, (1, 2, 3, 4, 5)
    ):
        calls = [call.name for segment in segments[1::2] for call in message_calls(task, segment)]
        assert calls == ["write_file", "run_tests", "submit"]
        assert segments[2].text == f"<|tool|>ok\nPASS left {LIMITS.test_runs - 1}<|eot|>"


def test_without_tests_there_is_one_message():
    for _, segments in some(DemonstrationConfig(p_right=0.5, p_test=0.0, p_give_up=0.0), 50):
        assert len(segments) == 2


def test_what_the_tests_say_is_true():
    shown = {"PASS": 0, "FAIL": 0}
    for task, segments in some(IMPERFECT, 300):
        texts = attempts(task, segments)
        for text, observation in zip(texts, segments[2::2], strict=False):
            word = observation.text.removeprefix("<|tool|>ok\n").split()[0]
            assert (word == "PASS") == right(task, text)
            shown[word] += 1
    assert min(shown.values()) > 50


def test_an_episode_goes_on_after_failure_unless_it_gives_up():
    for p_give_up, longer in ((1.0, False), (0.0, True)):
        pairs = some(DemonstrationConfig(p_right=0.0, p_test=1.0, p_give_up=p_give_up), 50, (2,))
        assert any(len(attempts(task, segments)) > 1 for task, segments in pairs) == longer


def test_the_same_seed_gives_the_same_demonstration():
    again = [one.__wrapped__(IMPERFECT, index, (1, 2), LIMITS) for index in range(20)]
    assert some(IMPERFECT, 20) == again


def test_texts_are_short_enough_for_a_small_context(tokenizer):
    pairs = some(IMPERFECT, 250)
    assert tokenizer.vocab_size <= 512
    assert max(len(tokenizer.encode(segments[0].text)) for _, segments in pairs) <= 96
    lengths = sorted(
        sum(len(tokenizer.encode(segment.text)) for segment in segments) for _, segments in pairs
    )
    assert lengths[len(lengths) * 95 // 100] <= 300
    messages = [
        len(tokenizer.encode(segment.text)) for _, segments in pairs for segment in segments[1::2]
    ]
    assert max(messages) <= 64


def test_only_generated_tasks_are_demonstrated():
    task = generate("train", 0, 0)
    other = Task(
        **{
            **{name: getattr(task, name) for name in task.__dataclass_fields__},
            "meta": {"source": "mbpp"},
        }
    )
    with pytest.raises(ValueError, match="mbpp"):
        demonstrate(other, random.Random(0), IMPERFECT, LIMITS)
    with pytest.raises(ValueError, match="turns=0"):
        none = Limits(turns=0, tokens=1, turn_tokens=1, test_runs=0, command_s=1.0)
        demonstrate(task, random.Random(0), IMPERFECT, none)
