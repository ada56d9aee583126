"""Reads the recorded decisions of programmers about suggestions: ``copilot_sessions.jsonl``.

The file has one event a line (Mozannar et al., 2210.14306): a suggestion is Shown, perhaps shown
again without a change while the programmer types (Replay), then Accepted or Rejected. A *decision*
is that whole run, from the first showing to its end.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_code.text.lines import split_lines

FILE = "copilot_sessions.jsonl"
# Moments after the acceptance at which the accepted text was looked at again. The file says only
# that there are five; these are the seconds at which the product of that time is known to have
# looked, so a time in seconds that comes from here is an assumption.
LOOKED_AT_S = (15.0, 30.0, 120.0, 300.0, 600.0)
_ENDS = {"Accepted": True, "Rejected": False}
_SHOWN = ("Shown", "Replay", "Browsing")


class TelemetryError(ValueError):
    """A file of telemetry that cannot be used; the message names the file and the line."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """View of a programmer at the moment when a suggestion is shown."""

    # Geometric mean of the chances of the suggestion's tokens, 0 to 1; None where it is unknown.
    confidence: float | None
    # Characters and lines of the suggestion.
    characters: int
    lines: int
    # Characters of the line before the cursor, its indentation included.
    column: int
    # Place of the cursor: "blank" (only white space before it in the line), "word" (inside a
    # word) or "other" (after a space, a bracket or the like).
    place: str

    @classmethod
    def of(cls, before: str, suggestion: str, confidence: float | None) -> Seen:
        """before: the text in front of the cursor."""
        line = before.rpartition("\n")[2]
        if not line.strip():
            place = "blank"
        else:
            place = "word" if line[-1].isalnum() or line[-1] == "_" else "other"
        lines = len(split_lines(suggestion.strip("\n"))) or 1
        return cls(confidence, max(len(suggestion), 1), lines, len(line), place)


@dataclasses.dataclass(frozen=True)
class Decision:
    """One suggestion and what a programmer did with it."""

    person: int
    # Unix seconds when it was first shown.
    at: float
    seen: Seen
    # Seconds from the first showing to the decision.
    shown_s: float
    accepted: bool
    # Share of the accepted text that is alive at each of LOOKED_AT_S; empty if it was rejected.
    alive: tuple[float, ...]


def find_file(folder: str | None) -> Path:
    """The file of telemetry in a folder, or in the one that RL_CODE_DATA names.

    Raises:
      TelemetryError: there is no folder or no such file in it.
    """
    folder = folder or os.environ.get("RL_CODE_DATA", "")
    if not folder:
        raise TelemetryError(f"name the folder of {FILE}: --data=FOLDER or RL_CODE_DATA=FOLDER")
    path = Path(folder) / FILE
    if not path.is_file():
        raise TelemetryError(f"{folder} has no file {FILE}")
    return path


def read(path: Path) -> list[Decision]:
    """The decisions of a file, by person and then by time.

    A run without an end (the session stopped) is no decision and is left out.

    Raises:
      TelemetryError: the file cannot be read, a line is not as expected, or nothing was decided.
    """
    try:
        lines = split_lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TelemetryError(f"{path} cannot be read: {error}") from error
    decisions = []
    open_at: float | None = None
    before: tuple[int, str] | None = None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            person, event, suggestion = int(row["session"]), row["event"], str(row["suggestion"])
            at = datetime.datetime.fromisoformat(row["time"]).timestamp()
            if event not in (*_ENDS, *_SHOWN):
                raise ValueError(f"event {event!r} is none of {(*_ENDS, *_SHOWN)}")
            # a Shown opens a run, and so does anything about another suggestion or person
            if event == "Shown" or before != (person, suggestion) or open_at is None:
                open_at = at
            before = (person, suggestion)
            if event in _ENDS:
                decisions.append(_decision(row, person, open_at, at))
                open_at = None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TelemetryError(
                f"{path}:{number}: no event of telemetry: {type(error).__name__}: {error}"
            ) from error
    if not decisions:
        raise TelemetryError(f"{path} has no event Accepted or Rejected in {len(lines)} lines")
    return sorted(decisions, key=lambda one: (one.person, one.at))


def _decision(row: Mapping[str, Any], person: int, shown_at: float, at: float) -> Decision:
    accepted = _ENDS[row["event"]]
    confidence = row["measurements"].get("confidence")
    if confidence is not None and not 0 <= float(confidence) <= 1:
        raise ValueError(f"confidence {confidence} must be in [0, 1]")
    alive = tuple(1 - float(share) for share in row["edit_percentage"]) if accepted else ()
    if accepted and (len(alive) != len(LOOKED_AT_S) or not all(0 <= x <= 1 for x in alive)):
        raise ValueError(f"edit_percentage {row['edit_percentage']} must be five shares in [0, 1]")
    seen = Seen.of(
        row["prompt"], row["suggestion"], None if confidence is None else float(confidence)
    )
    # Where the first showing was lost, the event itself says how long the suggestion stood there.
    said = float(row["measurements"].get("timeSinceDisplayedMs", 0)) / 1000
    shown_s = max(at - shown_at, said, 0.001)
    if not math.isfinite(shown_s):
        raise ValueError(f"timeSinceDisplayedMs {said * 1000} must be finite")
    return Decision(person, shown_at, seen, shown_s, accepted, alive)


def by_person(decisions: Sequence[Decision]) -> dict[int, list[Decision]]:
    """The decisions of each person."""
    people: dict[int, list[Decision]] = {}
    for one in decisions:
        people.setdefault(one.person, []).append(one)
    return people
