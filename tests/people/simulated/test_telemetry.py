"""What is read from recorded sessions, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from people.simulated import telemetry
from people.simulated.telemetry import Seen, TelemetryError


def row(event, second, suggestion="x + 1", session=0, **more):
    return {
        "session": session,
        "time": f"2022-08-08T16:05:{second:02d}.500Z",
        "event": event,
        "suggestion": suggestion,
        "prompt": "def f(x):\n    return ",
        "measurements": {"confidence": 0.5, "timeSinceDisplayedMs": 10.0},
        "edit_percentage": [0.0, 0.0, 0.25, 0.25, 1.0],
        **more,
    }


def write(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def test_a_decision_lasts_from_the_first_showing_to_its_end(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        row("Shown", 1),
        row("Replay", 3),
        row("Accepted", 7),
        row("Shown", 8, "y"),
        row("Rejected", 10, "y"),
        row("Shown", 11, "never decided"),
    )
    accepted, rejected = telemetry.read(path)
    assert (accepted.shown_s, accepted.accepted) == (6.0, True)
    assert accepted.alive == (1.0, 1.0, 0.75, 0.75, 0.0)
    assert (rejected.shown_s, rejected.accepted, rejected.alive) == (2.0, False, ())


def test_a_lost_showing_is_replaced_by_what_the_event_says(tmp_path):
    late = row("Rejected", 9, measurements={"timeSinceDisplayedMs": 4000.0})
    (decision,) = telemetry.read(write(tmp_path / "a.jsonl", late))
    assert decision.shown_s == 4.0
    assert decision.seen.confidence is None


@pytest.mark.parametrize(
    ("before", "place", "column"),
    [("a\n    ", "blank", 4), ("a\nreturn ", "other", 7), ("ret", "word", 3), ("f(", "other", 2)],
)
def test_the_place_in_the_line(before, place, column):
    seen = Seen.of(before, "x\ny", None)
    assert (seen.place, seen.column, seen.lines) == (place, column, 2)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (row("Sneezed", 1), "event 'Sneezed' is none of"),
        (row("Rejected", 1, measurements={"confidence": 2}), "must be in [0, 1]"),
        (row("Accepted", 1, edit_percentage=[0.0]), "must be five shares"),
        ([1], "TypeError"),
        ({"session": 1}, "KeyError: 'event'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, broken, why):
    path = write(tmp_path / "a.jsonl", row("Shown", 1), broken)
    with pytest.raises(TelemetryError) as error:
        telemetry.read(path)
    assert f"{path}:2" in str(error.value) and why in str(error.value)


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("RL_CODE_DATA", raising=False)
    with pytest.raises(TelemetryError, match="RL_CODE_DATA=FOLDER"):
        telemetry.find_file("")
    with pytest.raises(TelemetryError, match=r"has no file copilot_sessions\.jsonl"):
        telemetry.find_file(str(tmp_path))
    with pytest.raises(TelemetryError, match="no event Accepted or Rejected in 1 lines"):
        telemetry.read(write(tmp_path / "a.jsonl", row("Shown", 1)))
    with pytest.raises(TelemetryError, match="cannot be read"):
        telemetry.read(tmp_path / "none")


@pytest.mark.skipif("RL_CODE_DATA" not in os.environ, reason="RL_CODE_DATA is not set")
def test_the_real_file_has_as_many_decisions_as_its_description_says():
    decisions = telemetry.read(telemetry.find_file(None))
    accepted = sum(one.accepted for one in decisions)
    assert (accepted, len(decisions) - accepted) == (270, 529)
    assert len(telemetry.by_person(decisions)) == 16
