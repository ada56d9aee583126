"""Credit of stores by what their notes do to later episodes.

Some episodes of a group B read the notes of earlier ones without one of them. What the others earn
more, on average, is the worth of this note: a contrast between siblings, which nothing but the note
parts. At the step of B the message that stored it, in an episode A of an earlier step, is trained
with this number as its advantage. Nothing else of A is trained again.

So A's tokens are as old as B is later: they are weighed like other stale ones
(``train.loss.correction``), and no store is credited that is more than ``memory.oldest`` steps old.
Which notes are left out, and what is credited, follows from the record alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl_code.environment.notes import LEFT_OUT
from rl_code.learner.advantages import rewards_of
from rl_code.rollout.memory import MemoryConfig
from rl_code.store.store import GroupStore
from rl_code.types import Group, Trajectory, Turn


def worth(group: Group) -> float | None:
    """Mean reward of the episodes of a group that read a note, less that of those that did not;
    None where no note was left out, or where on one side there are only faults.
    """
    if LEFT_OUT not in group.task.meta:
        return None
    _, first, _ = group.task.meta[LEFT_OUT]
    rewards, valid = rewards_of(group)
    without = np.array([t.index >= first for t in group.trajectories])
    sides = rewards[valid & ~without], rewards[valid & without]
    if not all(map(len, sides)):
        return None
    return float(np.mean(sides[0]) - np.mean(sides[1]))


def late(
    store: GroupStore, groups: Sequence[Group], memory: MemoryConfig
) -> list[tuple[Group, float]]:
    """The stores that the groups of a step tell the worth of: each a group of one trajectory, in
    which only the message that stored stands as sampled, and its advantage. Raises StoreError.
    """
    found = []
    for group in groups if memory.left_out else ():
        value = worth(group)
        if value is None:
            continue
        name, _, (step, number, index) = group.task.meta[LEFT_OUT]
        origin = store.record(step, number).group
        trajectory = next(t for t in origin.trajectories if t.index == index)
        turn = memory.found().made_by(trajectory, name)
        if turn is not None and trajectory.status != "fault":
            found.append((Group(origin.task, (only(trajectory, turn),)), value))
    return found


def only(trajectory: Trajectory, turn: Turn) -> Trajectory:
    """The trajectory in which the tokens of one message alone stand as sampled."""
    contexts = []
    for index, context in enumerate(trajectory.contexts):
        places = np.arange(len(context.tokens))
        here = (places >= turn.start) & (places < turn.end) & (index == turn.context)
        chosen = here[context.sampled]
        choices = context.choices and {name: x[chosen] for name, x in context.choices.items()}
        sampled = context.sampled & here
        contexts.append(dataclasses.replace(context, sampled=sampled, choices=choices))
    return dataclasses.replace(trajectory, contexts=tuple(contexts))
