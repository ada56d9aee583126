"""Demonstrations for an agent of others have the tokens that an episode of it records."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from configs.mini_swe_agent import TEMPLATES
from models.tokenizer import Tokenizer
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.tools.api import find_tools
from rl_code.harness.command_chat import CommandChat
from rl_code.harness.harness import Harness
from rl_code.harness.mini_swe_agent import MiniSweAgent
from rl_code.tasks.demonstrations import (
    DemonstrationConfig,
    check_demonstrable,
    demonstrate,
    walk_words,
)
from rl_code.tasks.repositories import LEVELS, generate
from rl_code.types import Limits
from tests.rl_code.harness import minimal_agent
from tests.rl_code.harness.chats import agent_episode, mini_python, minimal, say
from tests.rl_code.harness.test_mini_swe_agent import needs_package

LIMITS = Limits(turns=8, tokens=2000, turn_tokens=99, test_runs=0, command_s=60.0, tools_s=300.0)
MINI = MiniSweAgent(python=mini_python() or "", calls="text", format_errors=0, **TEMPLATES)
MINIMAL = CommandChat(
    system=minimal_agent.SYSTEM,
    instance="{{task}}\nEnd with " + minimal_agent.END,
    observation="{{output.output}}exit {{output.returncode}}",
)


def assert_recorded(agent, chat, sandboxes):
    """That episodes in which walks are said record the walks' tokens."""
    words = walk_words(Compact(), {}, None, chat)
    tasks = [generate("train", 0, i, (LEVELS[i % 4],), (5, 8)) for i in range(6)]
    config = DemonstrationConfig(p_guess=0.2)
    walks = [
        demonstrate(t, random.Random(i), config, LIMITS, words=words) for i, t in enumerate(tasks)
    ]
    texts = ["".join(segment.text for segment in walk) for walk in walks]
    tokenizer = Tokenizer.train(texts, 500, Compact.SPECIAL_TOKENS, eos="<|eot|>", pad="<|pad|>")
    harness = Harness(agent)
    solved = 0
    try:
        for task, walk in zip(tasks, walks, strict=True):
            episode = agent_episode(
                task, sandboxes, harness, limits=LIMITS, protocol="compact", tokenizer=tokenizer
            )
            try:
                assert tokenizer.decode(episode.start()) == walk[0].text
                for message, answer in itertools.zip_longest(walk[1::2], walk[2::2]):
                    told = say(episode, message.text, tokenizer)
                    assert (told is None) == (answer is None)
                    assert answer is None or tokenizer.decode(told) == answer.text
                trajectory = episode.finish()
            finally:
                episode.close()
            assert trajectory.status == "submitted"
            pieces = [(tokenizer.encode(segment.text), segment.sampled) for segment in walk]
            assert list(trajectory.tokens) == [token for ids, _ in pieces for token in ids]
            mask = [[sampled] * len(ids) for ids, sampled in pieces]
            assert np.array_equal(trajectory.sampled, list(itertools.chain(*mask)))
            # a walk without a guess mends the fault
            thoughts = " no\n" in "".join(segment.text for segment in walk if segment.sampled)
            assert trajectory.solved or not thoughts
            solved += trajectory.solved
    finally:
        harness.close()
    assert 0 < solved < len(tasks)


def test_an_episode_of_the_program_records_the_tokens_of_a_walk(sandboxes):
    assert_recorded(minimal("block"), MINIMAL, sandboxes)


@needs_package
def test_an_episode_of_the_package_records_the_tokens_of_a_walk(sandboxes):
    assert_recorded(MINI, MINI.chat, sandboxes)


def test_an_agent_whose_conversation_is_not_known_has_no_walks():
    assert MiniSweAgent(calls="text").chat is None
    assert MiniSweAgent(**TEMPLATES).chat is None  # calls are tools
    assert minimal("text").chat is None
    check_demonstrable(Compact(), {}, ("repositories",), MINI)
    for agent in (MiniSweAgent(calls="text"), minimal("text")):
        with pytest.raises(ValueError, match=r"whose conversation is known.*leave sft out"):
            check_demonstrable(Compact(), find_tools(), ("repositories",), agent)
