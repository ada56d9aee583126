"""The vocabulary of what people did: answers, and the events that happened to them afterwards.

An *answer* is one response of the server: a suggestion in an editor, or one message of an agent.
A *session* is the answers of one person on one task. An *event* is what happened to an answer after
it was given. An *arm* is a version of the weights with a share of the users.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

# Seconds after an acceptance at which clients look how much of the text is alive. The last one is
# paid, and an accepted answer waits for it before a cycle trains on it (``waiting.Wait``).
HORIZONS_S = (30.0, 300.0, 3_600.0)

# What can happen to an answer, and what the value of such an event means.
EVENTS: Mapping[str, str] = {
    "shown": "seconds from the request to the moment when the person saw the answer",
    "accepted": "seconds from being shown to being accepted",
    "rejected": "seconds from being shown to being rejected, or typed past",
    "edited": "share of the answer's tokens that the person changed soon afterwards, 0 to 1",
    "retained": "share of the accepted tokens that are alive after `horizon_s`, 0 to 1",
    "reverted": "share of the answer's change that was taken back, 0 to 1",
    "follow_up": "chance that the person's next message is dissatisfied, 0 to 1; None if unknown",
    "switched": "1 when the person asked another model within the session",
    "left": "1 when the person did not come back",
    "opened": "1 when a pull request with the answer's change was opened",
    "merged": "1 when that pull request was merged",
    "thumbs": "1 for a thumb up, -1 for a thumb down; never part of a default reward",
}


# Key of ``AnswerRecord.extra``: what each token of ``given`` is (``Context.documents``), as pairs
# (kind, number of tokens). It is there where the model was served with documents.
DOCUMENTS = "documents"


@dataclasses.dataclass(frozen=True)
class AnswerRecord:
    """One answer as training needs it. Written before the last byte of the answer leaves."""

    # Made by the server alone: an HMAC over user, version and counter (``answer_id.py``).
    id: str
    # Keyed hash of the person's API key; never the key itself.
    user: str
    # The answers of one person on one task.
    session: str
    # Name of the model and version of the weights that sampled it; the adapter, "" for none.
    model: str
    version: int
    adapter: str
    # The arm of the experiment that the person is in; "" outside of one.
    arm: str
    # Unix seconds: when the request came, and when the answer was whole.
    asked_at: float
    answered_at: float
    # Seconds from the request to the first token.
    first_token_s: float
    # "chat" or "completion" (which includes fill-in-the-middle).
    kind: str
    # "stop", "length", "tool_calls", or "aborted" for one that the client or a crash cut off.
    # Of one whose server was killed there are no tokens (``extra["server_died"]``).
    finish_reason: str
    # Index of the context of the session's tree that it extends, its parent there (-1 for none) and
    # how many of the parent's tokens it keeps (``harness.endpoint.session``).
    context: int
    parent: int
    kept: int
    # New tokens that nobody sampled; then the sampled ones, each with its log-probability and the
    # version of the weights.
    given: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    # Further facts that the server knew, such as the reference of a task; plain JSON values.
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def kinds(self) -> tuple[int, ...] | None:
        """Kind of each token of ``given`` (``DOCUMENTS``); None for a model without documents."""
        runs = self.extra.get(DOCUMENTS)
        if runs is None:
            return None
        return tuple(kind for kind, count in runs for _ in range(count))


@dataclasses.dataclass(frozen=True)
class Event:
    """One reaction to one answer. An event may come before its answer is recorded, twice, late, or
    never.
    """

    # Chosen by the client; the same key a second time changes nothing.
    key: str
    answer: str
    # One of ``EVENTS``.
    kind: str
    # Unix seconds on the client's clock.
    at: float
    # Its meaning is told by ``EVENTS``.
    value: float | None = None
    # "retained" alone: seconds after the acceptance, one of ``HORIZONS_S``.
    horizon_s: float | None = None
    # The text of a follow-up message, and what else a client says; plain JSON values.
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def run_lengths(kinds: Sequence[int]) -> list[list[int]]:
    """The kinds of tokens as ``DOCUMENTS`` has them."""
    return [[kind, len(list(run))] for kind, run in itertools.groupby(kinds)]
