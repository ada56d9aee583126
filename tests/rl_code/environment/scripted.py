"""Episodes of a policy that says what a test wrote."""

from __future__ import annotations

import contextlib

from rl_code.environment.episode import Episode
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.tools.api import find_tools
from rl_code.types import Trajectory
from tests.rl_code.signals import rewarder


def play(task, pool, tokenizer, limits, *messages: str, index: int = 0) -> Trajectory:
    """A whole episode of messages in the compact protocol, graded."""
    episode = Episode(
        task,
        group=0,
        index=index,
        protocol=Compact(),
        tools=find_tools(),
        tokenizer=tokenizer,
        pool=pool,
        limits=limits,
        reward=rewarder(),
    )
    with contextlib.closing(episode):
        episode.start()
        for message in messages:
            tokens = tokenizer.encode(message)
            episode.step(tokens, [0.0] * len(tokens), [0] * len(tokens))
        return episode.finish()
