"""What an editor's server had to report is sent by the next one, if it was killed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from people.editor.outbox import Outbox, outbox_of
from people.editor.reporter import Reporter
from people.feedback.records import Event
from people.simulated.client import ServerRefused

ROOT = Path(__file__).resolve().parents[3]
EVENTS = [Event(f"key {number}", "answer", "left", 1.0, 1.0) for number in range(3)]
# Reports three events to a server that takes the first alone, and says so.
KILLED = """
import sys, time
from pathlib import Path
from people.editor.outbox import Outbox
from tests.people.editor.test_outbox import EVENTS
outbox = Outbox(Path(sys.argv[1]))
for event in EVENTS:
    outbox.add(event)
outbox.remove([EVENTS[0].key])
print("reported", flush=True)
time.sleep(600)
"""


class Kept:
    """A client that notes what it is told to report, once it may."""

    def __init__(self):
        self.told: list[Event] = []
        self.there = threading.Event()
        self.there.set()

    def report(self, events):
        if not self.there.wait(0.01):
            raise ServerRefused("away")
        self.told += events
        return {}

    def close(self) -> None:
        pass


@pytest.fixture
def killed(tmp_path):
    """A folder in which a process was at work until it was killed."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "reported\n"
        # while it lives, nobody else takes its events
        other = Outbox(tmp_path)
        assert other.left() == []
        other.close()
        process.kill()
    return tmp_path


def test_the_next_process_sends_what_a_killed_one_had_not_sent(killed):
    client = Kept()
    reporter = Reporter(client, Outbox(killed))
    assert reporter.close(60.0)
    assert client.told == EVENTS[1:]
    assert list(killed.iterdir()) == []


def test_a_line_that_was_cut_off_is_passed_over(killed):
    (file,) = killed.iterdir()
    file.write_text(file.read_text() + '{"event": {"key": "hal')
    outbox = Outbox(killed)
    assert outbox.left() == EVENTS[1:]
    # what was taken over is in the file of whoever took it
    again = Outbox(killed)
    assert again.left() == EVENTS[1:]
    again.close()


def test_events_stay_until_they_are_acknowledged(tmp_path):
    client = Kept()
    client.there.clear()
    reporter = Reporter(client, Outbox(tmp_path))
    reporter.report(EVENTS[0])
    assert not reporter.close(0.0)
    later = Outbox(tmp_path)
    assert later.left() == EVENTS[:1]
    client.there.set()
    assert reporter.close(60.0)


def test_persons_and_servers_have_folders_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folders = {outbox_of(url, key) for url in ("http://a", "http://b") for key in ("ann", "bob")}
    assert len(folders) == 4 and all(tmp_path in folder.parents for folder in folders)
    assert not any("ann" in str(folder) for folder in folders)
