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

from collections.abc import Sequence

from absl import logging

from rl_code.environment.episode import Episode
from rl_code.environment.sandbox.errors import SandboxFault, SnapshotError
from rl_code.rollout.rows import OpenGroup, Row


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
