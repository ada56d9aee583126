"""Generated tasks and their demonstrations in real episodes: same text, same tokens, same
verdicts.
"""

from __future__ import annotations

import random

import pytest

from models.tokenizer import Tokenizer
from rl_code.environment.episode import Episode
from rl_code.environment.grader import grade
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.tasks.demonstrations import DemonstrationConfig, demonstrate
from rl_code.tasks.generated import LEVELS, generate
from rl_code.types import Limits
from tests.rl_code.signals import rewarder

LIMITS = Limits(turns=5, tokens=2000, turn_tokens=400, test_runs=3, command_s=20.0)
IMPERFECT = DemonstrationConfig(p_right=0.4, p_test=0.8, p_give_up=0.2)
PROTOCOL = Compact()
SANDBOX = SandboxConfig(
    workers=1, memory_mb=512, processes=16, workspace_mb=16, cpu_s=10, output_bytes=10_000
)


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(SANDBOX) as pool:
        yield pool


@pytest.fixture(scope="module")
def demonstrated():
    """The first few, and those in which an attempt raises."""
    tasks = [generate("train", 11, index, tuple(LEVELS)) for index in range(200)]
    pairs = [
        (task, demonstrate(task, random.Random(index), IMPERFECT, LIMITS))
        for index, task in enumerate(tasks)
    ]
    raising = [pair for pair in pairs[20:] if any(" error " in segment.text for segment in pair[1])]
    assert raising
    return pairs[:20] + raising[:4]


@pytest.fixture(scope="module")
def tokenizer(demonstrated) -> Tokenizer:
    texts = ["".join(segment.text for segment in segments) for _, segments in demonstrated]
    return Tokenizer.train(texts, 400, Compact.SPECIAL_TOKENS)


def test_replayed_demonstrations_give_the_same_text_tokens_and_mask(demonstrated, tokenizer, pool):
    rewards = set()
    for task, segments in demonstrated:
        episode = Episode(
            task,
            group=0,
            index=0,
            protocol=PROTOCOL,
            tools=find_tools(),
            tokenizer=tokenizer,
            pool=pool,
            limits=LIMITS,
            reward=rewarder(),
        )
        given = episode.start()
        for segment in segments:
            tokens = tokenizer.encode(segment.text)
            if segment.sampled:
                given = episode.step(tokens, [0.0] * len(tokens), [0] * len(tokens))
            else:
                assert (tokenizer.decode(given), given) == (segment.text, tokens)
        assert given is None
        trajectory = episode.finish()
        pieces = [
            (token, segment.sampled)
            for segment in segments
            for token in tokenizer.encode(segment.text)
        ]
        assert (
            list(zip(trajectory.tokens.tolist(), trajectory.sampled.tolist(), strict=True))
            == pieces
        )
        assert trajectory.status == "submitted" and trajectory.malformed_calls == 0
        rewards.add(trajectory.reward.total)
    assert rewards == {0.0, 1.0}


def test_references_are_graded_as_solved_and_files_as_given_are_not(demonstrated, pool):
    for task, _ in demonstrated[:10]:
        for files, solved in ((task.reference, True), (task.files, False)):
            marks = grade(
                task.path, task.entry_point, task.hidden_tests, files, pool, LIMITS.command_s
            )
            assert all(marks.passed) == solved, (task.id, marks)
