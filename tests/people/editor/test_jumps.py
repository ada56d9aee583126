"""Jumps to the next edit in any open file, and what became of them."""

from __future__ import annotations

import asyncio

import pytest

from people.editor.clock import ManualClock
from people.editor.jumps import EditLog, Jumps, page_names
from people.simulated.client import Client, ServerRefused, Suggestion
from rl_code.tasks.jump_page import Edit

STORE, VIEWS = "file:///repo/src/store.py", "file:///repo/src/views.py"
PATHS = {STORE: "/repo/src/store.py", VIEWS: "/repo/src/views.py"}
BEFORE = "def load(path):\n    return path\n"
AFTER = BEFORE.replace("path)", "path, mode)")
USES = "from store import load\ndef main(path):\n    return load(path)\n"


class Fake(Client):
    """Says the same to every page."""

    def __init__(self, text: str | None):
        self.text = text
        self.pages = []

    def suggest(self, prefix, suffix, model="auto", *, session="", **fields):
        self.pages.append(prefix)
        assert suffix == ""
        if self.text is None:
            raise ServerRefused("no")
        return Suggestion("answer", self.text, "stop", (), 0.5)


class Editor:
    """Two open files, in one of which a parameter was added."""

    def __init__(self, text: str | None = "views.py:3"):
        self.events = []
        self.clock = ManualClock(100.0)
        self.client = Fake(text)
        self.jumps = Jumps(self.client, "auto", self.clock, self.events.append, 6000)
        self.texts = {STORE: BEFORE, VIEWS: USES}
        self.change(STORE, AFTER)

    def change(self, uri: str, text: str) -> None:
        before, self.texts[uri] = self.texts[uri], text
        self.jumps.changed(uri, before, text)

    def ask(self, at=(STORE, 1)):
        return asyncio.run(self.jumps.ask(PATHS, self.texts, at, "session"))

    @property
    def kinds(self):
        return [(event.kind, event.extra.get("why", "")) for event in self.events]


def test_the_page_has_the_edit_and_the_lines_that_it_concerns():
    editor = Editor()
    jump = editor.ask()
    assert (jump.uri, jump.line, jump.answer) == (VIEWS, 3, "answer")
    assert editor.client.pages == [
        "edit store.py:1\n-def load(path):\n+def load(path, mode):\nopen\n"
        "views.py:1 from store import load\nviews.py:3 main> return load(path)\n"
    ]
    assert editor.kinds == [("shown", "")] and editor.events[0].value == 0.5


def test_the_next_edit_tells_whether_it_was_taken():
    editor = Editor()
    editor.ask()
    editor.clock.move(3.0)
    editor.change(VIEWS, USES.replace("load(path)", "load(path, 1)"))
    assert editor.kinds[1:] == [("accepted", "")] and editor.events[1].value == 3.0
    editor = Editor()
    editor.ask()
    editor.change(VIEWS, USES.replace("main", "run"))
    assert editor.kinds[1:] == [("rejected", "edited_elsewhere")]


def test_a_command_takes_it_once():
    editor = Editor()
    editor.ask()
    assert not editor.jumps.accepted("other")
    assert editor.jumps.accepted("answer") and not editor.jumps.accepted("answer")
    editor.change(STORE, BEFORE)
    assert editor.kinds[1:] == [("accepted", "")]


@pytest.mark.parametrize("why", ["dismissed", "asked_again", "closed"])
def test_what_ends_a_jump_rejects_it(why):
    editor = Editor()
    editor.ask()
    if why == "closed":
        editor.jumps.closed(VIEWS)
    elif why == "asked_again":
        editor.ask()
    else:
        editor.jumps.reject(why)
    assert editor.kinds[1] == ("rejected", why)


@pytest.mark.parametrize("text", ["", "views.py:9", "other.py:1", "views.py", "views.py:0", None])
def test_nothing_is_shown_for_no_place(text):
    editor = Editor(text)
    assert editor.ask() is None and not editor.events


def test_no_jump_to_where_the_cursor_is_nor_without_an_edit():
    editor = Editor()
    assert editor.ask((VIEWS, 3)) is None
    editor.jumps.closed(STORE)
    assert editor.ask() is None and len(editor.client.pages) == 1
    assert not editor.events


def test_letters_at_one_place_are_one_edit_and_lines_move():
    log, text = EditLog(), "a = 1\nb = 2\nc = 3\n"

    def edit(before, after):
        log.changed("u", before, after)
        return after

    for letters in ("n", "ne", "new"):
        text = edit(text, f"a = 1\nb = 2\n{letters} = 3\n")
    names = {"u": "u.py"}
    assert log.latest(names) == [Edit("u.py", 3, ("c = 3",), ("new = 3",))]
    edit(text, "# first\n" + text)
    moved = Edit("u.py", 4, ("c = 3",), ("new = 3",))
    assert log.latest(names) == [moved, Edit("u.py", 1, (), ("# first",))]
    edit("# first\n" + text, text)
    assert log.latest(names) == [Edit("u.py", 3, ("c = 3",), ("new = 3",))]


def test_names_are_paths_from_the_folder_of_all():
    assert page_names(PATHS) == {STORE: "store.py", VIEWS: "views.py"}
    assert page_names({"a": "/r/a.py", "b": "/r/t/b.py"}) == {"a": "a.py", "b": "t/b.py"}
    assert page_names({"a": "untitled", "b": "/r/b.py"}) == {"a": "untitled", "b": "/r/b.py"}
