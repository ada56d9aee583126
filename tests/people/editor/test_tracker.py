"""What became of a suggestion is read from the changes of its document."""

from __future__ import annotations

import pytest

from people.editor.clock import ManualClock
from people.editor.next_edit import Place, Rename, next_place, rename
from people.editor.tracker import Tracker

BEFORE = "def f(x):\n    return "
AFTER = "\n"
TEXT = "x + 1"
URI = "file:///a.py"


class Editor:
    """A document with a suggestion at the end of its second line, shown at second 100."""

    def __init__(self, text: str = TEXT):
        self.events = []
        self.clock = ManualClock(100.0)
        self.tracker = Tracker(self.clock, self.events.append)
        self.tracker.opened(URI, BEFORE + AFTER, "python")
        at = len(BEFORE)
        self.tracker.shown(URI, "answer", at, at, text, 0.25)
        self.clock.move(2.0)

    def types(self, text: str) -> None:
        self.tracker.changed(URI, BEFORE + text + AFTER)

    @property
    def kinds(self):
        return [event.kind for event in self.events]


def test_an_insertion_is_an_acceptance_with_its_time():
    editor = Editor()
    editor.types(TEXT)
    shown, accepted = editor.events
    assert (shown.kind, shown.value, shown.at, shown.answer) == ("shown", 0.25, 100.0, "answer")
    assert (accepted.kind, accepted.value, accepted.at) == ("accepted", 2.0, 102.0)


def test_a_beginning_that_is_typed_leaves_it_open_until_the_rest_is_taken():
    editor = Editor()
    editor.types("x")
    editor.types("x +")
    assert editor.kinds == ["shown"]
    editor.types(TEXT)
    assert editor.kinds == ["shown", "accepted"]


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["x", "x *"], "typed_past"),
        (["", "y"], "typed_past"),
        ([TEXT[:n] for n in range(1, 6)], "typed_out"),
    ],
)
def test_what_is_typed_otherwise_is_a_rejection(texts, why):
    editor = Editor()
    for text in texts:
        editor.types(text)
    editor.types(TEXT)
    assert editor.kinds == ["shown", "rejected"]
    assert editor.events[1].extra == {"why": why}


def test_a_suggestion_is_decided_about_once():
    editor = Editor()
    assert editor.tracker.accepted(URI, "answer")
    editor.types(TEXT)
    assert not editor.tracker.accepted(URI, "answer")
    editor.tracker.closed(URI)
    assert editor.kinds == ["shown", "accepted"]


@pytest.mark.parametrize("end", ["closed", "dismissed", "replaced"])
def test_what_ends_a_suggestion_rejects_it(end):
    editor = Editor()
    if end == "closed":
        editor.tracker.closed(URI)
    elif end == "replaced":
        editor.tracker.shown(URI, "other", 0, 0, "y", 0.1)
    else:
        editor.tracker.reject(URI, "dismissed")
    assert editor.events[1].kind == "rejected" and editor.events[1].extra == {"why": end}


def test_retention_is_looked_at_when_its_horizons_are_reached():
    editor = Editor()
    editor.types(TEXT)
    editor.clock.move(29.0)
    assert editor.kinds == ["shown", "accepted"]
    editor.clock.move(1.0)
    editor.types("x + 2")
    editor.clock.move(270.0)
    editor.types("y")
    editor.tracker.closed(URI)
    editor.clock.move(3300.0)
    alive = [(e.horizon_s, e.value, e.at) for e in editor.events if e.kind == "retained"]
    assert alive == [
        (30.0, 1.0, 132.0),
        (300.0, pytest.approx(2 / 3), 402.0),
        (3600.0, 0.0, 3702.0),
    ]


def test_a_replacement_is_accepted_where_it_stands():
    editor = Editor()
    editor.tracker.changed(URI, "name = 1\nprint(nam)\n")
    at = len("name = 1\nprint(")
    editor.tracker.shown(URI, "second", at, at + 3, "name", 0.1)
    editor.tracker.changed(URI, "name = 1\nprint(name)\n")
    assert editor.kinds[-2:] == ["shown", "accepted"]


def test_a_rename_is_the_only_difference():
    assert rename("a = 1\nb = a\n", "c = 1\nb = a\n") == Rename("a", "c")
    assert rename("a = 1\n", "a = 2\n") is None
    assert rename("a = 1\n", "b = 2\n") is None
    assert rename("a = 1\n", "a = 1\nb = 2\n") is None


def test_the_next_edit_is_where_the_old_name_is_left_or_the_tree_is_broken():
    text = "new = 1\nprint(old)\nold += 1  # old\n"
    first, second = text.index("old"), text.index("old +=")
    renamed = Rename("old", "new")
    assert next_place(text, 0, renamed) == Place(first, first + 3, "renamed")
    assert next_place(text, first + 1, renamed) == Place(second, second + 3, "renamed")
    assert next_place(text, len(text), renamed) == Place(first, first + 3, "renamed")
    assert next_place("x = 1\n", 0, renamed) is None
    broken = next_place("ü = 1\ny = (2 +\n", 0, None)
    assert broken is not None and broken.why == "error" and broken.start > 6
