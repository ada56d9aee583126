"""What the commands on recorded runs print."""

from __future__ import annotations

from pathlib import Path

from launch import bisect, redteam, replay
from rl_code.recording.bisect import Comparison
from rl_code.redteam.trial import Outcome
from rl_code.types import ToolResult, Turn


def test_a_turn_without_tokens_shows_what_its_tools_returned():
    results = (ToolResult("write", "ok"), ToolResult("submit", "submitted"))
    last = Turn("tool", 79, 79, "", results=results)
    told = replay.shown(last)
    assert told == "--- tool, not read by the model\nwrite: ok\nsubmit: submitted"
    assert replay.shown(Turn("assistant", 51, 79, "abc")) == "--- assistant, tokens 51 to 78\nabc"


def test_a_longer_run_is_said_to_go_on(capsys):
    found = Comparison(range(40), (range(40), range(52)), groups=640)
    bisect.tell(Path("a"), Path("b"), found)
    assert capsys.readouterr().out.splitlines() == [
        "a and b are equal in steps 0 to 39, 640 groups; nothing but times was left out",
        "b goes on to step 51, which the other one has not done",
        "no input that is recorded differs",
    ]


def test_a_case_that_cannot_be_read_is_a_row_of_the_table():
    _, row = redteam.table([Outcome("sessions", "c.jsonl:1", redteam._COLUMNS[0], harm=("no",))])
    assert row[:3] == ["sessions", "c.jsonl:1", ""] and row[-1] == "no"
