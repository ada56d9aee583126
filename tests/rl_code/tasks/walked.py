"""Demonstrations of our own agent beside the episodes that they say they are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from models.tokenizer import Tokenizer
from rl_code.environment.episode import Episode
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.tool import Tool
from rl_code.tasks.demonstrations import Segment
from rl_code.types import Limits, Task
from tests.rl_code.signals import rewarder


def assert_said_by_episodes(
    pairs: Sequence[tuple[Task, Sequence[Segment]]],
    protocol: Compact,
    tools: Mapping[str, Tool],
    pool: SandboxPool,
    limits: Limits,
) -> None:
    """That an episode which is given the messages of a task's demonstration says what stands there
    between them.
    """
    texts = ["".join(segment.text for segment in segments) for _, segments in pairs]
    tokenizer = Tokenizer.train(texts, 400, Compact.SPECIAL_TOKENS, eos="<|eot|>", pad="<|pad|>")
    for task, segments in pairs:
        episode = Episode(
            task,
            group=0,
            index=0,
            protocol=protocol,
            tools=tools,
            tokenizer=tokenizer,
            pool=pool,
            limits=limits,
            reward=rewarder("tests"),
        )
        assert tokenizer.decode(episode.start()) == segments[0].text
        for message, answer in itertools.zip_longest(segments[1::2], segments[2::2]):
            ids = tokenizer.encode(message.text)
            told = episode.step(ids, [0.0] * len(ids), [0] * len(ids))
            assert (told is None) == (answer is None)
            assert answer is None or tokenizer.decode(told) == answer.text
        trajectory = episode.finish()
        assert trajectory.status == "submitted" and trajectory.malformed_calls == 0
