"""Parts of an episode whose tokens have a credit of their own, or are not trained.

Every part is read from the record of an episode, as a mask over the tokens of each of its contexts:

summaries: messages with which a later context begins (``environment.summaries``); of agents of
  others, those whose text stands in the given text of a later context that is shorter.
sub_agents: contexts that begin with something else than the group's prompt. A program of others
  that forgets its whole history begins such a context, too.
rejected: messages that were asked for again, word by word, and from which nothing goes on. Episodes
  of our own have none.

A token that is not trained is read like one that was given, and counts in no average of the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from rl_code.config.read_config import ConfigError
from rl_code.learner.advantages import Advantage, Credit, group_advantages
from rl_code.text.messages import said
from rl_code.types import Group, Trajectory, Turn, root_of

# bool [T] for each context, True where its token belongs to a part.
Masks = list[np.ndarray]

# The fewest characters of a summary of others: shorter texts may stand anywhere.
_SHORTEST = 20

# A part's credit: that of the whole episode; "own", the same advantage among those episodes of the
# group that have the part; or "none", where it is not trained.
Paid = Literal["episode", "own", "none"]


@dataclasses.dataclass(frozen=True)
class PartsConfig:
    """The credit of each part of an episode, by its name in ``PARTS``: "episode" for that of the
    whole episode, "own" for the same advantage among the episodes of the group that have the part,
    "none" for parts that are not trained.
    """

    # Summaries of a context that has grown long.
    summaries: str = "episode"
    # Contexts of sub-agents.
    sub_agents: str = "episode"
    # Answers that an agent of others asked for again.
    rejected: str = "episode"

    def __post_init__(self) -> None:
        for name, value in self._credits().items():
            if value not in ("episode", "own", "none"):
                raise ConfigError(
                    f"config.train.parts.{name} = {value!r} must be 'episode', 'own' or 'none'"
                )

    def paid(self, how: Paid) -> tuple[str, ...]:
        """Names of the parts with this credit."""
        return tuple(name for name, value in self._credits().items() if value == how)

    def _credits(self) -> dict[str, str]:
        """The credit of each part."""
        return {
            "summaries": self.summaries,
            "sub_agents": self.sub_agents,
            "rejected": self.rejected,
        }


def summaries(trajectory: Trajectory) -> Masks:
    """The tokens of summaries."""
    masks = _nothing(trajectory)
    for turn in summary_turns(trajectory):
        masks[turn.context][turn.start : turn.end] = True
    return masks


def summary_turns(trajectory: Trajectory) -> list[Turn]:
    """The messages that are summaries, in the order of the contexts that begin with them."""
    later = range(1, len(trajectory.contexts))
    found = [_summary_of(trajectory, index) for index in later]
    return [turn for turn in found if turn is not None]


def sub_agents(trajectory: Trajectory) -> Masks:
    """The tokens of contexts that do not begin with the episode's prompt."""
    masks = _nothing(trajectory)
    for index in range(1, len(masks)):
        masks[index][:] = root_of(trajectory.contexts, index) > 0
    return masks


def rejected(trajectory: Trajectory) -> Masks:
    """The tokens of messages that were asked for again."""
    masks = _nothing(trajectory)
    contexts = trajectory.contexts
    last: dict[bytes, Turn] = {}
    for turn in sorted(_messages(trajectory), key=lambda turn: (turn.context, turn.start)):
        kept = contexts[turn.context].kept
        before = trajectory.whole(turn.context)[: kept + turn.start].tobytes()
        earlier = last.get(before)
        if earlier is not None and not _goes_on(trajectory, earlier):
            masks[earlier.context][earlier.start : earlier.end] = True
        last[before] = turn
    return masks


PARTS: dict[str, Callable[[Trajectory], Masks]] = {
    "summaries": summaries,
    "sub_agents": sub_agents,
    "rejected": rejected,
}


def trained(
    trajectory: Trajectory, credit: Credit, untrained: Sequence[str]
) -> tuple[Trajectory, Credit]:
    """A trajectory in which the tokens of some parts stand as given ones, and its credit without
    theirs.

    untrained: names of parts.
    """
    left_out = _any_of(trajectory, untrained)
    if not any(mask[context.sampled].any() for mask, context in _with(left_out, trajectory)):
        return trajectory, credit
    keep = ~np.concatenate(left_out)[trajectory.sampled]
    contexts = []
    for mask, context in _with(left_out, trajectory):
        chosen = ~mask[context.sampled]
        choices = context.choices and {name: x[chosen] for name, x in context.choices.items()}
        sampled = context.sampled & ~mask
        contexts.append(dataclasses.replace(context, sampled=sampled, choices=choices))
    kept = dataclasses.replace(trajectory, contexts=tuple(contexts))
    if isinstance(credit, np.ndarray) and credit.ndim:
        credit = credit[keep]
    return kept, credit


def of_trained(groups: Sequence[Group], untrained: Sequence[str]) -> Sequence[Group]:
    """Groups in which the tokens of some parts stand as given ones. untrained: names of parts."""
    if not untrained:
        return groups
    return [
        dataclasses.replace(
            group, trajectories=tuple(trained(t, 0.0, untrained)[0] for t in group.trajectories)
        )
        for group in groups
    ]


def credited(
    groups: Sequence[Group],
    credits: Sequence[Sequence[Credit]],
    advantage: Advantage,
    config: PartsConfig,
) -> Sequence[Sequence[Credit]]:
    """The credits of groups, where parts with a credit of their own have that.

    credits: of each trajectory, by group, as ``group_advantages`` returns them.
    """
    for name in config.paid("own"):
        credits = [
            _with_own(group, values, advantage, PARTS[name])
            for group, values in zip(groups, credits, strict=True)
        ]
    return credits


def _with_own(
    group: Group,
    credits: Sequence[Credit],
    advantage: Advantage,
    part: Callable[[Trajectory], Masks],
) -> list[Credit]:
    """The credits of a group in which one part has that of the episodes that have the part."""
    found = [np.concatenate(part(t))[t.sampled] for t in group.trajectories]
    having = [at for at, where in enumerate(found) if where.any()]
    credits = list(credits)
    if not having:
        return credits
    among = Group(group.task, tuple(group.trajectories[at] for at in having))
    (own,) = group_advantages([among], advantage)
    for at, value in zip(having, own, strict=True):
        credits[at] = np.where(found[at], value, credits[at]).astype(np.float32)
    return credits


def _summary_of(trajectory: Trajectory, index: int) -> Turn | None:
    """The message of which a context begins as its summary; None for any other context."""
    context = trajectory.contexts[index]
    given = int(np.argmax(context.sampled)) if context.sampled.any() else len(context.tokens)
    if not given:
        return None
    if context.parent >= 0 and (turn := _last(trajectory, context.parent)) is not None:
        own = trajectory.contexts[turn.context].tokens[turn.start : turn.end]
        if len(own) <= given and np.array_equal(own, context.tokens[: len(own)]):
            return turn
    first = next((t for t in trajectory.turns if t.context == index), None)
    if first is None or first.role == "assistant":
        return None
    # the newest of the contexts that are longer than this one's beginning
    for earlier in reversed(range(index)):
        turn = _last(trajectory, earlier)
        if turn is None or _goes_on(trajectory, turn):
            continue
        shrinks = trajectory.contexts[earlier].kept + turn.start > context.kept + given
        text = said(turn.text)
        if shrinks and len(text) >= _SHORTEST and text in first.text:
            return turn
    return None


def _messages(trajectory: Trajectory) -> list[Turn]:
    return [turn for turn in trajectory.turns if turn.role == "assistant"]


def _last(trajectory: Trajectory, index: int) -> Turn | None:
    """The last message of a context; None where it has none."""
    own = [turn for turn in _messages(trajectory) if turn.context == index]
    return max(own, key=lambda turn: turn.start, default=None)


def _goes_on(trajectory: Trajectory, turn: Turn) -> bool:
    """True if another message stands behind this one, in its context or in one that keeps it."""
    if any(
        other.context == turn.context and other.start > turn.start
        for other in _messages(trajectory)
    ):
        return True
    start = trajectory.contexts[turn.context].kept + turn.start
    return any(c.parent == turn.context and c.kept > start for c in trajectory.contexts)


def _nothing(trajectory: Trajectory) -> Masks:
    return [np.zeros(len(context.tokens), bool) for context in trajectory.contexts]


def _any_of(trajectory: Trajectory, names: Sequence[str]) -> Masks:
    """The tokens of several parts."""
    found = _nothing(trajectory)
    for name in names:
        found = [a | b for a, b in zip(found, PARTS[name](trajectory), strict=True)]
    return found


def _with(masks: Masks, trajectory: Trajectory) -> zip:
    return zip(masks, trajectory.contexts, strict=True)
