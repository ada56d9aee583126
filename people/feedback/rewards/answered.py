"""Input of a signal: an answer, its events, and the next answer of its session."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from people.feedback.records import AnswerRecord, Event


@dataclasses.dataclass(frozen=True)
class Answered:
    """An answer and its events. Made by ``answered``."""

    answer: AnswerRecord
    # At most one of each kind, and one of "retained" for each horizon.
    events: tuple[Event, ...]
    # The answer of the same session that was asked for next, which has the one after it: a session
    # may be long, so that a list of the later ones for each would be much. A comparison or a text
    # would go through all of them.
    following: Answered | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def later(self) -> Iterator[Answered]:
        """The answers of the same session that came later, in the order in which they were asked
        for.
        """
        one = self.following
        while one is not None:
            yield one
            one = one.following

    def first(self, kind: str) -> Event | None:
        """The event of a kind; None if there is none."""
        return next((event for event in self.events if event.kind == kind), None)

    def value(self, kind: str, unsaid: float = 1.0) -> float:
        """The value of the event of a kind, 0 if it did not happen. unsaid: its value where it
        happened and has none.
        """
        event = self.first(kind)
        if event is None:
            return 0.0
        return unsaid if event.value is None else event.value

    def soon(self, kind: str, within_s: float) -> float:
        """``value``, but 0 if it happened later than so many seconds after the answer."""
        event = self.first(kind)
        if event is None or event.at - self.answer.answered_at > within_s:
            return 0.0
        return self.value(kind)

    @property
    def accepted(self) -> bool:
        """True if the person took it: the earlier one of "accepted" and "rejected" says so."""
        decision = next((e for e in self.events if e.kind in ("accepted", "rejected")), None)
        return decision is not None and decision.kind == "accepted"

    @property
    def is_question(self) -> bool:
        """True if it asks the person something, as its server saw."""
        return bool(self.answer.extra.get("question", False))


def answered(joined: Sequence[tuple[AnswerRecord, Sequence[Event]]]) -> list[Answered]:
    """Convert the result of ``FeedbackStore.joined`` to the input of signals, in the same order.

    An event that is said again under another key does not count again: the first of each kind by
    the client's clock does, so the order of arrival does not matter.
    """
    # of each session the earliest answer so far, as the latest come first
    followers: dict[tuple[str, str], Answered] = {}
    found: dict[str, Answered] = {}
    for answer, events in sorted(joined, key=lambda one: (one[0].asked_at, one[0].id))[::-1]:
        # sessions are named by clients, so a name is its user's own
        session = answer.user, answer.session
        found[answer.id] = Answered(answer, _once(events), followers.get(session))
        followers[session] = found[answer.id]
    return [found[answer.id] for answer, _ in joined]


def _once(events: Sequence[Event]) -> tuple[Event, ...]:
    kept: dict[tuple[str, float | None], Event] = {}
    for event in sorted(events, key=lambda event: (event.at, event.key)):
        kept.setdefault((event.kind, event.horizon_s), event)
    return tuple(kept.values())
