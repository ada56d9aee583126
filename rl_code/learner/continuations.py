"""Training on continuations: a group that parts in the middle of an episode.

What goes on from one border, the episode that was forked there among it, is a group of its own: the
credit of a continuation is relative to the others that part there (``rollout.forks``). Only its own
tokens are trained on; those before its fork are read, and are the other trajectory's to train on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl_code.learner.advantages import Advantage, Credit, group_advantages
from rl_code.types import Group, Trajectory


def with_continuations(
    group: Group, credits: Sequence[Credit], advantage: Advantage
) -> tuple[Group, list[Credit]]:
    """A group whose trajectories are those of ``group``, each with its continuations behind it, and
    the credit of each. They stand together so that a row has what they share once.

    credits: of the group's trajectories. advantage: gives the continuations of a border theirs.
    """
    trajectories: list[Trajectory] = []
    values: list[Credit] = []
    for trajectory, credit in zip(group.trajectories, credits, strict=True):
        trajectories.append(trajectory)
        values.append(credit)
        for _, part in group.parted_from(trajectory.index):
            together = Group(group.task, (trajectory, *part))
            (found,) = group_advantages([together], advantage)
            for one, value in zip(part, found[1:], strict=True):
                trajectories.append(own_part(one))
                values.append(_own_credit(one, value))
    return Group(group.task, tuple(trajectories)), values


def own_part(trajectory: Trajectory) -> Trajectory:
    """The trajectory with its own tokens alone as sampled ones."""
    if trajectory.fork is None:
        return trajectory
    contexts = []
    own = trajectory.own_sampled
    for context in trajectory.contexts:
        mask, own = own[: len(context.tokens)], own[len(context.tokens) :]
        choices = context.choices
        if choices is not None:
            kept = mask[context.sampled]
            choices = {name: x[kept] for name, x in choices.items()}
        contexts.append(
            dataclasses.replace(
                context,
                sampled=mask,
                logprobs=np.where(mask, context.logprobs, np.float32(0.0)),
                versions=np.where(mask, context.versions, np.int32(-1)),
                choices=choices,
            )
        )
    return dataclasses.replace(trajectory, contexts=tuple(contexts))


def _own_credit(trajectory: Trajectory, credit: Credit) -> Credit:
    """The part of a credit that is for a trajectory's own tokens."""
    if np.ndim(credit) == 0:
        return credit
    return np.asarray(credit)[trajectory.own_sampled[trajectory.sampled]]
