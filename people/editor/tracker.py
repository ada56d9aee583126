"""Tracker of the fate of suggestions, seen from the text of the documents alone.

An editor tells its language server how a document changes, and nothing else for certain. So:
- a suggestion was *shown* when it was answered and the document was still the same;
- it was *accepted* when what is left of it stands in the document after one change;
- typing its beginning, letter by letter, leaves it open;
- any other change, another request or the end of the document is a *rejection*, with its reason.
Retention is the survival of the accepted tokens, looked at when its horizons are reached.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable

from people.editor.clock import Clock
from people.editor.tokens import Accepted
from people.feedback.records import HORIZONS_S, Event


@dataclasses.dataclass
class Open:
    """A suggestion that was shown and not decided about."""

    answer: str
    shown_at: float
    # The document when it was shown, and the characters of it that the text would replace.
    base: str
    start: int
    end: int
    text: str
    # Number of characters of the text that were typed since.
    typed: int = 0

    def with_text(self, count: int) -> str:
        """The document with the first ``count`` characters of the text; all of them replace the
        range, a beginning stands before it.
        """
        rest = self.base[self.end if count == len(self.text) else self.start :]
        return self.base[: self.start] + self.text[:count] + rest


class Tracker:
    """Follows the suggestions of one editor; not for several threads."""

    def __init__(self, clock: Clock, report: Callable[[Event], None]):
        self._clock = clock
        self._report = report
        self._texts: dict[str, str] = {}
        self._languages: dict[str, str] = {}
        self._open: dict[str, Open] = {}

    def opened(self, uri: str, text: str, language: str) -> None:
        """A document was opened."""
        self._texts[uri] = text
        self._languages[uri] = language

    def text(self, uri: str) -> str:
        """The last text of a document; "" for one that was never opened."""
        return self._texts.get(uri, "")

    def shown(self, uri: str, answer: str, start: int, end: int, text: str, seconds: float) -> None:
        """A suggestion is before the person's eyes.

        start, end: the characters of the document that it replaces; the same for an insertion.
        seconds: from the request until now.
        """
        self.reject(uri, "replaced")
        now = self._clock.now()
        self._open[uri] = Open(answer, now, self.text(uri), start, end, text)
        self._event(answer, "shown", seconds)

    def changed(self, uri: str, text: str) -> None:
        """A document has a new text: all changes of one notification together."""
        before = self._texts.get(uri)
        self._texts[uri] = text
        one = self._open.get(uri)
        if one is None or text == before:
            return
        whole = len(one.text)
        if text == one.with_text(whole):
            # the last letter alone was typed, not accepted, unless it is all there is
            if one.typed == whole - 1 > 0:
                self.reject(uri, "typed_out")
            else:
                self._accept(uri, one)
            return
        typed = next((n for n in range(whole) if text == one.with_text(n)), None)
        if typed is None:
            self.reject(uri, "typed_past")
        else:
            one.typed = typed

    def accepted(self, uri: str, answer: str) -> bool:
        """The editor says that a suggestion was accepted, before or after the change; whether that
        was news.
        """
        one = self._open.get(uri)
        if one is None or one.answer != answer:
            return False
        # the change may still be on its way
        self._texts[uri] = one.with_text(len(one.text))
        self._accept(uri, one)
        return True

    def reject(self, uri: str, why: str) -> None:
        """Record that the open suggestion of a document was not taken."""
        one = self._open.pop(uri, None)
        if one is not None:
            seconds = self._clock.now() - one.shown_at
            self._event(one.answer, "rejected", seconds, extra={"why": why})

    def closed(self, uri: str) -> None:
        """A document was closed. What was accepted there is looked at in its last text."""
        self.reject(uri, "closed")

    def _accept(self, uri: str, one: Open) -> None:
        del self._open[uri]
        self._event(one.answer, "accepted", self._clock.now() - one.shown_at)
        language = self._languages.get(uri, "")
        end = one.start + len(one.text)
        then = Accepted.at(self.text(uri), one.start, end, language)
        for horizon_s in HORIZONS_S:
            self._clock.later(horizon_s, lambda at=horizon_s: self._look(uri, one, then, at))

    def _look(self, uri: str, one: Open, then: Accepted, horizon_s: float) -> None:
        share = then.alive(self.text(uri))
        if share is not None:
            self._event(one.answer, "retained", share, horizon_s)

    def _event(
        self,
        answer: str,
        kind: str,
        value: float,
        horizon_s: float | None = None,
        extra: dict[str, str] | None = None,
    ) -> None:
        key = uuid.uuid4().hex
        self._report(Event(key, answer, kind, self._clock.now(), value, horizon_s, extra or {}))
