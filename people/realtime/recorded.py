"""Sessions of the record as the cycle's test and monitors read them: one number per metric.

A session is the answers of one person on one task. Its numbers are means over its answers of what
is known of each: a rate that nobody reported stays unknown, and is not taken for 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from people.feedback.outcomes import Selection, SelectionChanged
from people.feedback.records import AnswerRecord, Event
from people.feedback.rewards.follow_up import chance_of
from people.feedback.store import FeedbackStore
from people.realtime.parts import Overtaken, Sessions
from people.serving.counted import RATES

# Answers, each with its events in the order of their times.
type Joined = Sequence[tuple[AnswerRecord, Sequence[Event]]]
# The parts of the reward of each answer, by name, with the sum as "reward"; nan for an unknown one.
# It is given all answers at once, since one may be paid for what a later one of its session earned.
type Rewarded = Callable[[Joined], Sequence[Mapping[str, float]]]

# What ``metrics_of`` tells of an answer. Sessions have all of it, also while there are none.
METRICS = (
    "accepted",
    "retained",
    "edited",
    "dissatisfied",
    "length",
    "latency",
    "aborted",
    *RATES,
)


class RecordedStore:
    """The store of the cycle (``parts.Store``) on that of feedback."""

    def __init__(
        self, record: FeedbackStore, rewarded: Rewarded | None = None, names: Sequence[str] = ()
    ):
        """rewarded: the rewards of answers by the config's signals; None for none. names: what it
        tells.
        """
        self._record = record
        self._rewarded = rewarded
        # What sessions have, also while there are none.
        self.metrics = (*METRICS, *names)

    def select(self, watermark: float, versions: Collection[int], most: int) -> Selection:
        return self._record.select(watermark, versions, most)

    def used(self, cycle: int) -> Selection | None:
        return self._record.used(cycle)

    def mark_used(self, cycle: int, selection: Selection) -> None:
        try:
            self._record.mark_used(cycle, selection)
        except SelectionChanged as error:
            # Somebody took data back since it was selected; the cycle selects again.
            raise Overtaken(str(error)) from error

    def expire(self, cycle: int, now: float) -> None:
        """Everything is kept."""

    def sessions(self, versions: Collection[int], since: float) -> Sessions:
        joined = self._believed(self._record.joined(self._record.routed(versions, since)))
        return sessions_of(joined, self._rewarded, self.metrics)

    def _believed(self, joined: Joined) -> Joined:
        """The answers and events that count. A subclass that knows suspects leaves theirs out."""
        return joined


def sessions_of(
    joined: Joined, rewarded: Rewarded | None = None, names: Sequence[str] = ()
) -> Sessions:
    """The sessions of answers, in the order in which they ended. names: what ``rewarded`` tells.

    A session in which the version changed counts as one for each version.
    """
    found: dict[tuple[str, str, int], list[tuple[AnswerRecord, dict[str, float]]]] = {}
    known = dict.fromkeys((*METRICS, *names))
    rewards = [{}] * len(joined) if rewarded is None else rewarded(joined)
    for (answer, events), reward in zip(joined, rewards, strict=True):
        metrics = metrics_of(answer, events) | reward
        known |= dict.fromkeys(metrics)
        key = answer.user, answer.session, answer.version
        found.setdefault(key, []).append((answer, metrics))
    ended = {key: max(answer.answered_at for answer, _ in rows) for key, rows in found.items()}
    keys = sorted(found, key=lambda key: (ended[key], key))
    return Sessions(
        session=np.array([f"{session}" for _, session, _ in keys], dtype=object),
        user=np.array([user for user, _, _ in keys], dtype=object),
        version=np.array([version for _, _, version in keys], np.int64),
        at=np.array([ended[key] for key in keys], np.float64),
        values={
            name: np.array([_mean(found[key], name) for key in keys], np.float64) for name in known
        },
    )


def metrics_of(answer: AnswerRecord, events: Sequence[Event]) -> dict[str, float]:
    """Metrics of one answer; nan for each that is not known."""
    last = {event.kind: event for event in events}
    value = {kind: event.value for kind, event in last.items()}
    kept = [event for event in events if event.kind == "retained" and event.value is not None]
    decided = "accepted" in last or "rejected" in last
    aborted = answer.finish_reason == "aborted"
    metrics = {
        "accepted": float("accepted" in last) if decided else math.nan,
        # at the last horizon that was reached
        "retained": max(kept, key=lambda one: one.horizon_s or 0.0).value if kept else math.nan,
        "edited": _known(value.get("edited")),
        "dissatisfied": _known(chance_of(last["follow_up"]) if "follow_up" in last else None),
        # of one that was cut off nobody knows how long it would have become
        "length": math.nan if aborted else float(len(answer.tokens)),
        # of one that was cut off before its first token: until then; of one whose server was killed
        # nobody knows when that was
        "latency": math.nan if answer.extra.get("server_died") else answer.first_token_s,
        "aborted": float(aborted),
    }
    return metrics | {name: _known(answer.extra.get(name)) for name in RATES}


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _mean(rows: Sequence[tuple[AnswerRecord, dict[str, float]]], name: str) -> float:
    values = [metrics.get(name, math.nan) for _, metrics in rows]
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
