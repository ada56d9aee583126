"""The line of progress: on a terminal, off one, and while no update comes."""

from __future__ import annotations

import io
import threading

import pytest

from rl_code.metrics import progress as progress_lib
from rl_code.metrics.progress import Progress


@pytest.fixture
def every_line(monkeypatch):
    """Lines of progress may follow each other at once."""
    monkeypatch.setattr(progress_lib, "_PLAIN_S", 0.0)


def test_progress_off_a_terminal_leaves_time_between_two_lines(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_lib.time, "monotonic", lambda: now[0])
    text = io.StringIO()
    with Progress("suite", total=467, file=text) as progress:
        for done in range(1, 468):
            now[0] += 1.0
            progress.update(done)
    lines = text.getvalue().splitlines()
    assert len(lines) <= 467 / progress_lib._PLAIN_S + 2
    assert lines[-1].startswith("suite  467/467")


def test_progress_on_a_terminal_is_one_line(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    text = Terminal()
    with Progress("suite", total=467, file=text) as progress:
        for done in range(1, 468):
            progress.update(done)
    assert text.getvalue().count("\n") <= 2 and "467/467" in text.getvalue()


def test_progress_off_a_terminal_prints_plain_lines(every_line):
    text = io.StringIO()
    with Progress("train", total=3, file=text) as progress:
        for step in range(3):
            progress.update(step + 1, reward=0.5, pass_rate=0.25, tokens_per_s=1234.5, phase="[rl]")
        progress.note("wrote [report]")
    lines = text.getvalue().splitlines()
    assert lines.pop(0).startswith("train  0/3  begins; the first result waits for programs")
    assert (
        lines[0].startswith("train  1/3  reward 0.50  pass 25%  1,234 tok/s  phase [rl]")
        and "left" in lines[0]
    )
    assert lines[2].startswith("train  3/3") and "left" not in lines[2]
    assert lines[3:] == ["wrote [report]"]


def test_progress_of_work_without_programs_tells_of_none(every_line):
    text = io.StringIO()
    with Progress("cheats", total=3, file=text, compiles=False):
        pass
    assert text.getvalue() == "cheats  0/3  begins\n"


def test_progress_prints_about_a_hundred_lines_of_a_long_run(every_line):
    text = io.StringIO()
    with Progress("train", total=2000, start=1000, file=text) as progress:
        for step in range(1000, 2000):
            progress.update(step + 1)
    assert len(text.getvalue().splitlines()) == 1 + 50


def test_progress_says_that_the_work_goes_on_while_no_update_comes(monkeypatch):
    waits = []

    class Event(threading.Event):
        """An end that comes in the third wait."""

        def wait(self, timeout=None):
            waits.append(timeout)
            return len(waits) == 3

    monkeypatch.setattr(progress_lib.threading, "Event", Event)
    text = io.StringIO()
    progress = Progress("suite", total=9, file=text)
    progress._stay_alive()
    assert waits == [30.0, 60.0, 120.0]
    assert [line.startswith("suite  0/9  goes on, ") for line in text.getvalue().splitlines()] == [
        True,
        True,
    ]
    assert "0 programs compiled so far" in text.getvalue()
