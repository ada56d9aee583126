"""Forks of episodes at turn borders: a group parts in the middle of an episode.

At a border the workspace is copied, and ``continuations`` episodes go on from there, each with a
random stream of its own. Their mean return is an unbiased estimate of the value of the state at the
border (VinePPO, 2410.01679, section 4). They are recorded with their group, in
``Group.continuations``, so they count once, like its trajectories.

The tokens before the border are prefilled once for all continuations of it. So a continuation
depends on these tokens and its own random stream, and on no key that decoding wrote: it can be
sampled again without the episode that it parts from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from absl import logging

from rl_code.config.read_config import at_least
from rl_code.environment.episode import Episode
from rl_code.environment.sandbox.errors import SandboxFault, SnapshotError
from rl_code.rollout.rows import OpenGroup, Row


@dataclasses.dataclass(frozen=True)
class ForksConfig:
    """Forks of the episodes that are trained on."""

    # Episodes that go on from each border that is chosen.
    continuations: int = 4
    # A border is chosen after each so many messages of the assistant.
    every: int = 1
    # The most borders of an episode; the first ones are chosen. None for all.
    borders: int | None = None
    # Episodes of each group that are forked, the first ones. None for all.
    episodes: int | None = None

    def __post_init__(self):
        at_least(self, continuations=1, every=1, borders=1, episodes=1)

    def chooses(self, index: int, turn: int) -> bool:
        """True if the episode of this index is forked after ``turn`` messages."""
        if turn < 1 or turn % self.every or (self.episodes is not None and index >= self.episodes):
            return False
        return self.borders is None or turn // self.every <= self.borders

    def most(self, turns: int, group_size: int) -> int:
        """The most continuations of a group whose episodes have at most ``turns`` messages."""
        borders = (turns - 1) // self.every  # behind the last message nothing goes on
        if self.borders is not None:
            borders = min(borders, self.borders)
        forked = group_size if self.episodes is None else min(self.episodes, group_size)
        return forked * borders * self.continuations

    def indices(self, index: int, turn: int, group_size: int) -> range:
        """Indices of the continuations of a border. They follow from its place alone, and not from
        what was forked before: the index fixes the random stream.
        """
        first = group_size + ((turn - 1) * group_size + index) * self.continuations
        return range(first, first + self.continuations)


def fork(episode: Episode, indices: Sequence[int]) -> list[Episode]:
    """Continuations of an episode as it stands, of these indices. None, and a warning, where its
    workspace cannot be copied: that is the agent's or the sandbox's doing, and shows in what comes
    of the episode itself.
    """
    try:
        first = episode.fork(indices[0])
    except (SnapshotError, SandboxFault) as error:
        logging.warning(
            "episode %d of task %s is not forked: %s", episode.index, episode.task.id, error
        )
        return []
    # copies of a copy, which has the files at hand
    return [first, *(first.fork(index) for index in indices[1:])]


def group_of(episodes: Sequence[Episode], parent: OpenGroup, before: Sequence[Row]) -> OpenGroup:
    """The continuations of a border as a group whose prompt is all that stands before it.

    parent: the group that they belong to. before: the rows of the contexts of the episode that they
    part from, in order, as they stand at the border.
    """
    group = OpenGroup(tag=parent.tag, key=parent.key, task=parent.task, parent=parent)
    group.adapter, group.owner = parent.adapter, parent.owner
    group.rows = [_row(episode, group, before) for episode in episodes]
    group.unopened = group.rows[::-1]
    parent.parts.append(group)
    return group


def _row(episode: Episode, group: OpenGroup, before: Sequence[Row]) -> Row:
    """The row of an episode's own context. Those of sub-agents that are done stand beside it, so
    that contexts keep their numbers, and what was noted of their tokens is on record here too.
    """
    contexts = [
        Row(
            episode=episode,
            group=group,
            adapter=group.adapter,
            owner=group.owner,
            context=number,
            cached=row.cached if number else 0,
            keys=list(row.keys),
            choices={name: list(parts) for name, parts in row.choices.items()},
        )
        for number, row in enumerate(before)
    ]
    own = contexts[0]
    own.key = group.key
    if len(contexts) > 1:
        for row in contexts:
            row.contexts = contexts
    return own
