"""Checks of answers and events before they are recorded. Clients are not trusted."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from models.marks import encodable_all
from people.feedback.records import EVENTS, HORIZONS_S, AnswerRecord, Event

# Longest key of an event, id of an answer, session or name, in characters.
LONGEST_NAME = 200
# Longest JSON of what else an event says, in characters.
LONGEST_EXTRA = 16_384

# Kind -> least and greatest value. Seconds may be unknown, and what happened has the value 1 where
# none is given; the others mean nothing without a value.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "shown": (0, math.inf),
    "accepted": (0, math.inf),
    "rejected": (0, math.inf),
    "edited": (0, 1),
    "retained": (0, 1),
    "reverted": (0, 1),
    "follow_up": (0, 1),
    "switched": (0, 1),
    "left": (0, 1),
    "opened": (0, 1),
    "merged": (0, 1),
    "thumbs": (-1, 1),
}
# Fields of an answer that are names, and the length that each column has.
_NAMES: Mapping[str, int] = {
    "id": LONGEST_NAME,
    "user": 64,
    "session": LONGEST_NAME,
    "model": LONGEST_NAME,
    "adapter": LONGEST_NAME,
    "arm": LONGEST_NAME,
    "kind": 32,
    "finish_reason": 32,
}
_MAY_BE_EMPTY = ("adapter", "arm")
_NEED_VALUE = ("edited", "retained", "reverted", "thumbs")


@dataclasses.dataclass(frozen=True)
class Claims:
    """Rule by which claims of retention are recorded: those at ``HORIZONS_S``, once these can be
    over. The last horizon is paid, so a horizon that nobody measures, or that lies ahead, would
    earn what the honest ones do not.
    """

    # A claim may come this many seconds before its horizon can be over: as much as clocks differ.
    # Simulated people, who know at once how long a text lives, need their longest horizon.
    early_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.early_s >= 0:
            raise ValueError(f"{self.early_s=} must be at least 0")

    def why_not(self, event: Event, answered_at: float | None, now: float) -> str:
        """Reason why an event is not recorded; "" for an event that is recorded.

        answered_at: when its answer was whole; None while it is not recorded. Answers are recorded
        before their end is sent, so nobody has accepted such a one yet.
        """
        if event.horizon_s is None:
            return ""
        if event.horizon_s not in HORIZONS_S:
            known = ", ".join(f"{one:g}" for one in HORIZONS_S)
            return f"horizon_s={event.horizon_s:g} is none of {known}"
        passed_s = 0.0 if answered_at is None else now - answered_at
        if event.horizon_s > passed_s + self.early_s:
            return f"{passed_s:.0f} s after its answer nothing is known of {event.horizon_s:g} s"
        return ""


def check_event(event: Event) -> None:
    """Raises ValueError, which says what is wrong with an event and what would be right."""
    _check_name(event.key, "key")
    _check_name(event.answer, "answer")
    if event.kind not in EVENTS:
        raise ValueError(f"kind={event.kind!r}: expected one of {', '.join(EVENTS)}")
    _check_number(event.at, "at")
    if event.value is None:
        if event.kind in _NEED_VALUE:
            raise ValueError(f"kind={event.kind!r} needs a value: {EVENTS[event.kind]}")
    else:
        _check_number(event.value, "value")
        low, high = _BOUNDS[event.kind]
        if not low <= event.value <= high:
            raise ValueError(
                f"value={event.value} of kind={event.kind!r}: expected {low:g} to {high:g}, the "
                f"{EVENTS[event.kind]}"
            )
    if (event.horizon_s is not None) != (event.kind == "retained"):
        raise ValueError(
            f"horizon_s={event.horizon_s}: {event.kind!r} events have one exactly if "
            "they are 'retained'"
        )
    if event.horizon_s is not None:
        _check_number(event.horizon_s, "horizon_s")
        if event.horizon_s <= 0:
            raise ValueError(f"horizon_s={event.horizon_s} must be above 0")
    _check_extra(event.extra, LONGEST_EXTRA)


def check_answer(answer: AnswerRecord) -> None:
    """Raises ValueError, which says what is wrong with an answer."""
    for name, longest in _NAMES.items():
        if getattr(answer, name) != "" or name not in _MAY_BE_EMPTY:
            _check_name(getattr(answer, name), name, longest)
    for name in ("asked_at", "answered_at", "first_token_s"):
        _check_number(getattr(answer, name), name)
    lengths = len(answer.tokens), len(answer.logprobs), len(answer.versions)
    if len(set(lengths)) > 1:
        raise ValueError(
            f"answer {answer.id}: tokens, logprobs and versions have the lengths {lengths}; they "
            "must be equal"
        )
    if not all(map(math.isfinite, answer.logprobs)):
        raise ValueError(f"answer {answer.id}: a log-probability is not finite")
    _check_extra(answer.extra, None)


def _check_name(value: Any, name: str, longest: int = LONGEST_NAME) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        shown = f"a text of {len(value)}" if isinstance(value, str) else repr(value)
        raise ValueError(f"{name} is {shown}; expected a text of 1 to {longest} characters")
    # no database takes lone surrogates, and PostgreSQL no zero character
    if not value.isprintable():
        raise ValueError(f"{name}={value!r} holds a character that cannot be printed")


def _check_number(value: Any, name: str) -> None:
    if type(value) not in (int, float) or not abs(value) < 1e15:  # NaN compares as false
        raise ValueError(f"{name}={value!r}: expected a finite number")


def _check_extra(extra: Any, longest: int | None) -> None:
    try:
        written = json.dumps(extra, allow_nan=False)
        half = encodable_all(extra) != extra
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"extra is no plain JSON: {error}") from error
    if half:
        raise ValueError("extra is not valid Unicode: it holds half of a character")
    if not isinstance(extra, Mapping):
        raise ValueError(f"extra={written[:80]}: expected an object")
    if longest is not None and len(written) > longest:
        raise ValueError(f"extra has {len(written)} characters of JSON; at most {longest} are kept")
