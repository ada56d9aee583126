"""Labels of turns without people, from recorded groups (Math-Shepherd, 2312.08935, section 3.2).

The label of a turn is the share of the continuations from the border behind it that solved the task
(equation 4, soft estimation), or 1 if any did (equation 3, hard estimation). The last turn of an
episode has no continuations: its label is whether the episode itself solved the task.

Episodes of several contexts are labelled in their first one, which is the one that is forked.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from rl_code.learner.monte_carlo import borders_of
from rl_code.learner.scored import Text
from rl_code.types import Group, Trajectory

Estimation = Literal["soft", "hard"]


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A recorded trajectory with the labels of its turns."""

    task_id: str
    text: Text


def labelled(
    groups: Iterable[Group], estimation: Estimation = "soft", ends: bool = True
) -> Iterator[Labelled]:
    """The labelled trajectories of groups, in order; those without a label are left out.

    Each border weighs as many continuations as its label is the share of, at most 1: all the same.
    estimation: "soft" or "hard". ends: whether the ends of episodes are labelled, too, of
    continuations as well, whose tokens before the fork are read and not labelled again.
    """
    if estimation not in ("soft", "hard"):
        raise ValueError(f"estimation={estimation!r} must be 'soft' or 'hard'")
    for group in groups:
        for trajectory in group.all if ends else group.trajectories:
            if trajectory.status == "fault":
                continue
            found = []
            if trajectory.fork is None:
                found = [
                    (border.fork.lengths[0] - 1, _label(border.share, estimation))
                    for border in borders_of(group, trajectory.index)
                ]
            if ends and (place := end_of(trajectory)) is not None:
                found.append((place, float(trajectory.solved)))
            if found:
                places, labels = zip(*found, strict=True)
                tokens = trajectory.contexts[0].tokens.tolist()
                text = Text(tokens, places, labels, (1.0,) * len(places))
                yield Labelled(group.task.id, text)


def borders_in(trajectory: Trajectory) -> list[int]:
    """The place of the last token before each turn border of a trajectory's first context, in
    order, its end among them.

    A border is behind what tools answered; that of the last turn is behind its message.
    """
    turns = [turn for turn in trajectory.turns if turn.context == 0 and turn.end > turn.start]
    messages = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
    # each message with what was answered to it, up to the next one
    ends = [turns[number - 1].end for number in messages[1:]]
    return [end - 1 for end in [*ends, *(turns[-1].end for _ in messages[:1])]]


def end_of(trajectory: Trajectory) -> int | None:
    """The place of the last token of the first context; None where no message stands there."""
    borders = borders_in(trajectory)
    return borders[-1] if borders else None


def split(found: Iterable[Labelled], held_out: float) -> tuple[list[Labelled], list[Labelled]]:
    """(Those to train on, those held out), by task: a task is on one side with all its
    trajectories, and on the same one in every run.

    held_out: the share of tasks.
    """
    if not 0.0 <= held_out < 1.0:
        raise ValueError(f"held_out={held_out} must be in [0, 1)")
    sides: tuple[list[Labelled], list[Labelled]] = ([], [])
    for one in found:
        digest = hashlib.blake2b(one.task_id.encode(), digest_size=8).digest()
        sides[int.from_bytes(digest) < held_out * 2**64].append(one)
    return sides


def _label(share: float, estimation: Estimation) -> float:
    return float(share > 0) if estimation == "hard" else float(np.float32(share))
