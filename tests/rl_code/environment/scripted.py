"""Episodes of a policy that says what a test wrote, in the compact protocol."""

from __future__ import annotations

import contextlib
from typing import Any

from rl_code.environment.episode import Episode
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.tools.api import find_tools
from rl_code.types import Trajectory
from tests.rl_code.signals import rewarder


def make_episode(
    task, pool, tokenizer, limits, *, group: int = 0, index: int = 0, reward=None, **more: Any
) -> Episode:
    """An episode that has not begun. reward: None for that of ``rewarder``. more: further arguments
    of Episode.
    """
    return Episode(
        task,
        group=group,
        index=index,
        protocol=Compact(),
        tools=find_tools(),
        tokenizer=tokenizer,
        pool=pool,
        limits=limits,
        reward=reward or rewarder(),
        **more,
    )


def begin(task, pool, tokenizer, limits, **more: Any) -> Episode:
    """An episode that waits for its first message. more: as of ``make_episode``."""
    episode = make_episode(task, pool, tokenizer, limits, **more)
    episode.start()
    return episode


def say(episode: Episode, tokenizer, *messages: str) -> None:
    """Messages of the policy, one after another."""
    for message in messages:
        tokens = tokenizer.encode(message)
        episode.step(tokens, [0.0] * len(tokens), [0] * len(tokens))


def play(task, pool, tokenizer, limits, *messages: str, **more: Any) -> Trajectory:
    """A whole episode of messages, graded. more: as of ``begin``."""
    with contextlib.closing(begin(task, pool, tokenizer, limits, **more)) as episode:
        say(episode, tokenizer, *messages)
        return episode.finish()
