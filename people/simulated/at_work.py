"""A simulated programmer at work: asks for suggestions by HTTP and reports what became of them."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

from people.feedback.records import HORIZONS_S, Event
from people.simulated.client import Client, Suggestion
from people.simulated.programmer import Programmer, Reaction


@dataclasses.dataclass(frozen=True)
class Hole:
    """A place in a file at which a programmer stops, and what is wanted there."""

    prefix: str
    suffix: str
    wanted: str


@dataclasses.dataclass
class Tally:
    """Counts of what people did with the holes so far."""

    asked: int = 0
    shown: int = 0
    accepted: int = 0
    refused_events: int = 0


def events_of(suggestion: Suggestion, reaction: Reaction, at: float) -> list[Event]:
    """The events of a suggestion that was shown at Unix second ``at``, in order of time. Their
    times may lie ahead: a simulated person knows at once how long a text will live.
    """

    def event(kind: str, after_s: float, value: float, horizon_s: float | None = None) -> Event:
        key = uuid.uuid4().hex
        return Event(key, suggestion.id, kind, at + after_s, value, horizon_s)

    decision = "accepted" if reaction.accepted else "rejected"
    return [
        event("shown", 0.0, suggestion.seconds),
        event(decision, reaction.seconds, reaction.seconds),
        *(
            event("retained", reaction.seconds + horizon_s, share, horizon_s)
            for horizon_s, share in reaction.alive
        ),
    ]


def seen_late(events: Sequence[Event]) -> list[Event]:
    """Events that a person knows of who looks only hours later: what was taken, and how much
    of it was alive at the last horizon. What was left in between shows nothing.
    """
    if not any(event.kind == "accepted" for event in events):
        return []
    last = HORIZONS_S[-1]
    return [event for event in events if event.kind == "accepted" or event.horizon_s == last]


def work(
    client: Client,
    programmer: Programmer,
    holes: Iterable[Hole],
    *,
    model: str = "auto",
    max_tokens: int = 32,
    seldom: bool = False,
    now: Callable[[], float] = time.time,
) -> Tally:
    """Goes through the holes, one after the other, without waiting as long as a person would.

    A suggestion without text is not shown, and nothing is reported about it. seldom: True for a
    person who looks only hours later (``seen_late``). Raises ServerRefused.
    """
    tally = Tally()
    for hole in holes:
        suggestion = client.suggest(hole.prefix, hole.suffix, model, max_tokens=max_tokens)
        tally.asked += 1
        if not suggestion.text.strip():
            continue
        reaction = programmer.react(hole.prefix, suggestion.text, hole.wanted)
        tally.shown += 1
        tally.accepted += reaction.accepted
        events = events_of(suggestion, reaction, now())
        refused = client.report(seen_late(events) if seldom else events)
        tally.refused_events += len(refused)
    return tally
