"""Summaries: where an agent's context has grown long, its next one begins with a summary of it.

After a message whose results bring the context to a number of tokens, the results are followed by a
request for a summary. What the policy then says is the summary, whatever it is: one that was cut or
is empty is an outcome, and no second one is asked for. The next context keeps the prompt. Behind it
stand the summary's own tokens, which are not encoded again, and a line that says how to go on.

So an episode becomes a tree of contexts that all keep its prompt. The summary's tokens are sampled
in the context that they end, and trained there with the credit of the episode; in the next context
they are given. This follows SUPO (2510.06727, section 3) with two departures: results that do not
fit are shown as left out, where SUPO takes back the last message; and no trajectory is left out of
training because it ran out of summaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rl_code.config.read_config import at_least
from rl_code.types import Limits, ToolResult, Trajectory, Turn, root_of

# Stands in place of a result for which the context has no room.
LEFT_OUT = "left out: no room"


@dataclasses.dataclass(frozen=True)
class SummariesConfig:
    """Settings of summaries: the length at which a context is summarised, and the longest one."""

    # Tokens of a context, the results of its last message included, from which on a summary is
    # asked for.
    trigger: int
    # The most tokens of one context: prompt, messages and results. ``limits.tokens`` then bounds
    # the tokens of all contexts of an episode, each counted once. None for as many as that.
    context: int | None = None
    # The most sampled tokens of one summary.
    tokens: int = 256
    # The most summaries of one episode; 0 for none, as in an ablation.
    most: int = 8
    # Text of the request, behind the results of a message.
    request: str = (
        "Your context is almost full. Write a summary now, and nothing else: what is done, what "
        "you learned of the files, what is left to do. You go on with the task and this summary."
    )
    # Text behind the summary in the next context.
    go_on: str = "Go on from this summary."

    def __post_init__(self) -> None:
        at_least(self, trigger=1, tokens=1, most=0)
        if self.context is not None and self.context < self.trigger + self.tokens:
            raise ValueError(
                f"context={self.context} must be at least trigger={self.trigger} and "
                f"tokens={self.tokens} together, else there is no room for a summary"
            )
        if not self.request.strip():
            raise ValueError(f"request={self.request!r} must ask for a summary")

    def longest(self, limits: Limits) -> int:
        """The most tokens of one context of an episode within these limits."""
        return min(self.context or limits.tokens, limits.tokens)

    @property
    def sampled(self) -> int:
        """The most tokens that all summaries of an episode may sample."""
        return self.most * self.tokens


@dataclasses.dataclass(frozen=True)
class Closing:
    """A last message that the agent is asked for when an episode is over."""

    # The most sampled tokens of it, and the text that asks for it.
    tokens: int
    request: str


# Ways of an episode to end behind which an agent may be asked for a last message.
_CLOSED = ("submitted", "turn_limit")


def closing_of(trajectory: Trajectory) -> Turn | None:
    """The last message of an episode of which one was asked for at its end (``Closing``); None for
    one that ended without it.
    """
    if not closes(trajectory.status):
        return None
    own = [at for at in range(len(trajectory.contexts)) if root_of(trajectory.contexts, at) == 0]
    turns = [turn for turn in trajectory.turns if turn.context == own[-1]]
    last = max(turns, key=lambda turn: turn.start, default=None)
    # messages of work have a call, if only a malformed one
    return last if last is not None and last.role == "assistant" and not last.calls else None


def closes(status: str) -> bool:
    """True if an episode that ended this way may be asked for a last message."""
    return status in _CLOSED


def longest_context(summaries: SummariesConfig | None, limits: Limits) -> int:
    """The most tokens of one context of an episode; summaries: None for none."""
    return limits.tokens if summaries is None else summaries.longest(limits)


def most_sampled(
    limits: Limits, summaries: SummariesConfig | None, closing: Closing | None = None
) -> int:
    """The most tokens that an episode may sample by its messages and summaries, if nothing else
    bounds them; None for no summaries, and for no message at the end.
    """
    more = (summaries.sampled if summaries else 0) + (closing.tokens if closing else 0)
    return limits.turns * limits.turn_tokens + more


def left_out(results: Sequence[ToolResult]) -> list[ToolResult]:
    """The results, each with a line in place of its text."""
    return [dataclasses.replace(result, content=LEFT_OUT) for result in results]
