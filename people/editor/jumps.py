"""Jumps to the next edit in any open file: which are asked for, and what became of them.

The model is asked with a page of the latest edits and of the lines that they may concern
(``tasks.jump_page``), as it was trained. An editor says what the person does with a jump by a
command, or it is read from the next edit: one at that line is an acceptance, one elsewhere a
rejection. So is another request, a dismissal, and the end of the document.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import PurePath

from people.editor.clock import Clock
from people.feedback.records import Event
from people.simulated.client import Client, ServerRefused
from rl_code.tasks import jump_page
from rl_code.tasks.jump_page import EDITS, Edit, Place

# The most tokens of an answer: a path and a number.
MOST_TOKENS = 32
# Characters of an open file that are looked at.
_LONGEST = 1 << 18


@dataclasses.dataclass(frozen=True)
class Jump:
    """A place that is shown."""

    # Id of the answer that it came with.
    answer: str
    uri: str
    # From 1.
    line: int


@dataclasses.dataclass
class _Logged:
    """One edit, and the text before it."""

    uri: str
    before: str
    edit: Edit


class EditLog:
    """The latest edits in all documents, the oldest first. Changes that follow each other at one
    place, letter by letter, are one edit.
    """

    def __init__(self) -> None:
        self._logged: list[_Logged] = []

    def changed(self, uri: str, before: str, after: str) -> Edit | None:
        """Logs a change of a document; the lines that it touched, None where it touched none."""
        change = jump_page.edit_between(uri, before, after)
        if change is None:
            return None
        last = self._logged[-1] if self._logged else None
        goes_on = last is not None and last.uri == uri and _touch(last.edit, change)
        if last is not None and goes_on:
            self._logged.pop()
        grown = len(change.added) - len(change.removed)
        for one in self._logged:
            if one.uri == uri and one.edit.line > change.line:
                line = max(change.line, one.edit.line + grown)
                one.edit = dataclasses.replace(one.edit, line=line)
        base = last.before if last is not None and goes_on else before
        edit = jump_page.edit_between(uri, base, after)
        if edit is not None:  # it may have been undone
            self._logged = [*self._logged, _Logged(uri, base, edit)][-EDITS:]
        return change

    def closed(self, uri: str) -> None:
        """Forgets the edits of a document that is open no longer."""
        self._logged = [one for one in self._logged if one.uri != uri]

    def latest(self, names: Mapping[str, str]) -> list[Edit]:
        """The edits with the names that documents have on a page. names: by uri."""
        return [dataclasses.replace(one.edit, path=names[one.uri]) for one in self._logged]


def _touch(edit: Edit, change: Edit) -> bool:
    """True if a change is of lines that an edit wrote, or removed lines between."""
    end = edit.line + max(len(edit.added), 1)
    return change.line < end and change.line + max(len(change.removed), 1) > edit.line


def page_names(paths: Mapping[str, str]) -> dict[str, str]:
    """Names of documents on a page: their paths from the folder that holds all of them.

    paths: by uri, as the machine of the editor writes them.
    """
    folders = [os.path.dirname(path) for path in paths.values()]
    try:
        common = os.path.commonpath(folders) if folders else ""
    except ValueError:  # on several drives, or not all of them absolute
        common = ""
    names = {}
    for uri, path in paths.items():
        names[uri] = PurePath(os.path.relpath(path, common) if common else path).as_posix()
    return names


class Jumps:
    """Asks for the jumps of one editor, and follows one at a time."""

    def __init__(
        self,
        client: Client,
        model: str,
        clock: Clock,
        report: Callable[[Event], None],
        longest: int,
    ):
        """longest: the most characters of a page."""
        self._client, self._model, self._longest = client, model, longest
        self._clock, self._report = clock, report
        self._log = EditLog()
        self._open: Jump | None = None
        self._shown_at = 0.0
        # Changes of documents so far: an answer to an older state is not shown.
        self._changes = 0
        self._one_at_a_time = asyncio.Lock()

    async def ask(
        self, paths: Mapping[str, str], texts: Mapping[str, str], at: tuple[str, int], session: str
    ) -> Jump | None:
        """The jump for the latest edits; None where the model has none, a document changed in the
        meantime, or the cursor stands there already.

        paths, texts: of the open documents, by uri. at: the uri and the line, from 1, of the
        cursor. session: what the answer belongs to; "" for the server's default.
        """
        self.reject("asked_again")
        names = page_names(paths)
        edits = self._log.latest(names)
        if not edits:
            return None
        files = {names[uri]: text[:_LONGEST] for uri, text in texts.items()}
        page = jump_page.write(edits, files, self._longest)
        async with self._one_at_a_time:
            changes = self._changes
            try:
                found = await asyncio.to_thread(
                    self._client.suggest,
                    page,
                    "",
                    self._model,
                    session=session,
                    max_tokens=MOST_TOKENS,
                )
            except ServerRefused as error:
                logging.warning("no jump: %s", error)
                return None
        place = jump_page.read(found.text, files)
        if place is None or self._changes != changes:
            return None
        jump = _found(place, names, found.id)
        if (jump.uri, jump.line) == at:
            return None
        self._open, self._shown_at = jump, self._clock.now()
        self._event(jump.answer, "shown", found.seconds)
        return jump

    def changed(self, uri: str, before: str, after: str) -> None:
        """A document has a new text."""
        change = self._log.changed(uri, before, after)
        if change is None:
            return
        self._changes += 1
        jump = self._open
        if jump is None:
            return
        last = change.line + max(len(change.removed), 1)
        if jump.uri == uri and change.line <= jump.line < last:
            self.accepted(jump.answer)
        else:
            self.reject("edited_elsewhere")

    def accepted(self, answer: str) -> bool:
        """The person went to the place that an answer named; whether that was news."""
        if self._open is None or self._open.answer != answer:
            return False
        self._open = None
        self._event(answer, "accepted", self._clock.now() - self._shown_at)
        return True

    def reject(self, why: str) -> None:
        """Record that the jump that is shown was not taken."""
        jump, self._open = self._open, None
        if jump is not None:
            self._event(jump.answer, "rejected", self._clock.now() - self._shown_at, why)

    def closed(self, uri: str) -> None:
        """A document was closed."""
        self._log.closed(uri)
        if self._open is not None and self._open.uri == uri:
            self.reject("closed")

    def _event(self, answer: str, kind: str, value: float, why: str = "") -> None:
        extra = {"why": why} if why else {}
        key = uuid.uuid4().hex
        self._report(Event(key, answer, kind, self._clock.now(), value, None, extra))


def _found(place: Place, names: Mapping[str, str], answer: str) -> Jump:
    """The place that an answer named, in the document of that name."""
    uri = next(uri for uri, name in names.items() if name == place.path)
    return Jump(answer, uri, place.line)
