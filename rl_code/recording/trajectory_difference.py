"""First difference of two trajectories: a token, a log-probability, a tool's result, the reward."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from rl_code.types import Group, Trajectory

# What is compared of each token, in this order; the name that it has for people.
_PER_TOKEN = {
    "versions": "version of the weights",
    "sampled": "whether the token was sampled",
    "documents": "document",
    "tokens": "token",
    "logprobs": "log-probability",
    "trainer_logprobs": "trainer's log-probability",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """First difference of two trajectories."""

    # "token", "log-probability", "tool answer", "reward" and so on
    kind: str
    # index of the trajectory in its group
    sample: int
    # place of the token among those of the trajectory; None for what belongs to the whole of it
    place: int | None
    there: Any
    here: Any

    def __str__(self) -> str:
        at = "" if self.place is None else f" at token {self.place}"
        return f"sample {self.sample}{at}: {self.kind} {self.there} there, {self.here} here"


def of_groups(there: Group, here: Group) -> Difference | None:
    """The first difference between two groups, in the order of their trajectories."""
    if there.task != here.task:
        names = there.task.id, here.task.id
        same = names[0] == names[1]
        return Difference(
            "task", 0, None, *((f"{names[0]}, other content",) * 2 if same else names)
        )
    counts = [(len(group.trajectories), len(group.all)) for group in (there, here)]
    if counts[0] != counts[1]:
        at = counts[0][0] == counts[1][0]  # then the continuations are others in number
        return Difference("number of trajectories", 0, None, *(count[at] for count in counts))
    for one, other in zip(there.all, here.all, strict=True):
        if (found := of_trajectories(one, other)) is not None:
            return found
    return None


def of_trajectories(there: Trajectory, here: Trajectory) -> Difference | None:
    """The first difference between two trajectories; None if only times differ.

    A tool's result comes before the tokens that were made of it, what the model chose for a token
    before the token, and a token before its log-probability. Log-probabilities are compared bit by
    bit.
    """
    parts = _answer(there, here), _choice(there, here), _token(there, here)
    found = [difference for difference in parts if difference is not None]
    if found:
        return min(found, key=lambda difference: difference.place)
    for kind in ("contexts", "status", "solved", "malformed_calls", "first_edit_passed"):
        one = _plain(getattr(there, kind))
        other = _plain(getattr(here, kind))
        if one != other:
            return Difference(kind.replace("_", " "), here.index, None, one, other)
    if there.milestones != here.milestones:
        return Difference("milestones", here.index, None, there.milestones, here.milestones)
    if _reward(there) != _reward(here):
        return Difference("reward", here.index, None, _reward(there), _reward(here))
    return None


def _token(there: Trajectory, here: Trajectory) -> Difference | None:
    length = min(len(there.tokens), len(here.tokens))
    first: tuple[int, str] | None = None
    for name in _PER_TOKEN:
        if name == "trainer_logprobs" and any(x.trainer_logprobs is None for x in (there, here)):
            continue  # one of them does not know it
        one, other = (_of_tokens(x, name)[:length] for x in (there, here))
        bits = (x.view(np.int32) if x.dtype == np.float32 else x for x in (one, other))
        differing = np.flatnonzero(np.not_equal(*bits))
        if len(differing) and (first is None or differing[0] < first[0]):
            first = int(differing[0]), name
    if first is not None:
        place, name = first
        values = (_of_tokens(x, name)[place].item() for x in (there, here))
        return Difference(_PER_TOKEN[name], here.index, place, *values)
    if len(there.tokens) != len(here.tokens):
        counts = (f"{len(x.tokens)} tokens" for x in (there, here))
        return Difference("length", here.index, length, *counts)
    return None


def _choice(there: Trajectory, here: Trajectory) -> Difference | None:
    """The first sampled token for which the model chose otherwise, where both have noted it."""
    before = 0
    for one, other in zip(there.contexts, here.contexts, strict=False):
        for name in sorted({*(one.choices or ())} & {*(other.choices or ())}):
            pairs = zip(one.choices[name], other.choices[name], strict=False)
            for number, (first, second) in enumerate(pairs):
                if not np.array_equal(first, second):
                    place = before + int(np.flatnonzero(here.sampled[before:])[number])
                    values = first.tolist(), second.tolist()
                    return Difference(f"choice of {name}", here.index, place, *values)
        before += len(other.tokens)
    return None


def _of_tokens(trajectory: Trajectory, name: str) -> np.ndarray:
    """A field of each token; that of the documents is 0 in a run without them."""
    found = getattr(trajectory, name)
    return np.zeros(len(trajectory.tokens), np.int32) if found is None else found


def _answer(there: Trajectory, here: Trajectory) -> Difference | None:
    """The first tool's result that differs, at the place of the first token that follows it."""
    for one, other in zip(there.turns, here.turns, strict=False):
        if one.role != other.role or one.start != other.start:
            return None  # the messages before differ, and so do their tokens
        for first, second in zip(one.results, other.results, strict=False):
            if (first.content, first.ok) != (second.content, second.ok):
                values = repr(first.content), repr(second.content)
                before = sum(len(context.tokens) for context in here.contexts[: other.context])
                return Difference("tool answer", here.index, before + one.start, *values)
    return None


def _reward(trajectory: Trajectory) -> str:
    reward = trajectory.reward
    return f"{reward.total!r} of {dict(reward.components)} {list(reward.flags)}"


def _plain(value: Any) -> Any:
    """A field as plain values; of contexts how they hang together."""
    if isinstance(value, tuple):
        return [(context.parent, context.kept, len(context.tokens)) for context in value]
    return value
