"""Parts of one answer in APIs that have a place for each: a thought, a text, calls.

Parts are sent as they are sampled, as far as they cannot become something else: a thought when it
has ended, a text letter by letter, and all at the end where calls may come.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from rl_code.environment.protocols.reading import THINK
from rl_code.harness.endpoint.answers import Accepted, Answer, Pending
from rl_code.harness.endpoint.bodies import settled
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.conversation import Call
from rl_code.harness.endpoint.fields import ApiError
from rl_code.harness.endpoint.requests import ChatRequest
from rl_code.harness.endpoint.thoughts import split_thought


@dataclasses.dataclass(frozen=True)
class Thought:
    """A whole thought, with its marks."""

    raw: str


@dataclasses.dataclass(frozen=True)
class Text:
    """Further text."""

    piece: str


Part = Thought | Text | Call


@dataclasses.dataclass(frozen=True)
class Form:
    """The request that an answer is written for, and the names of the answer."""

    request: ChatRequest
    text: ChatText
    accepted: Accepted

    @classmethod
    def of(cls, pending: Pending, text: ChatText, accepted: Accepted) -> Form:
        """The form of the answer to a request."""
        assert isinstance(pending.request, ChatRequest)
        return cls(pending.request, text, accepted)

    @property
    def id(self) -> str:
        """The part of the answer's id that all APIs share."""
        return self.accepted.id.removeprefix("chatcmpl-")

    @property
    def thinks(self) -> bool:
        """True if a message begins inside of a thought."""
        return self.text.protocol.thinking("")

    def parts(self, answer: Answer) -> list[Part]:
        """The parts of a whole answer."""
        return Parts(self).rest(answer)

    def thought_tokens(self, answer: Answer) -> int:
        """Number of the sampled tokens that spell the thought."""
        thought, _ = split_thought(answer.message.content, self.thinks)
        if not thought:
            return 0
        low, high = 0, len(answer.tokens)  # the first count whose text holds the whole thought
        while low < high:
            middle = (low + high) // 2
            if len(self.text.text(answer.tokens[:middle])) >= len(thought):
                high = middle
            else:
                low = middle + 1
        return low

    def ended_by(self, answer: Answer) -> str | None:
        """The text of the request that ended an answer; None for none."""
        sampled = self.text.text(answer.tokens)
        found = [(sampled.index(one), one) for one in self.request.stop if one in sampled]
        return min(found)[1] if found and answer.finish_reason == "stop" else None


class Parts:
    """The parts of an answer that grows."""

    def __init__(self, form: Form):
        self._form = form
        self._thought_sent = False
        self._sent = 0

    def grown(self, tokens: Sequence[int]) -> list[Part]:
        """New and settled parts since the last time."""
        request = self._form.request
        if request.held:
            return []
        known = settled(self._form.text.text(tokens), request.stop)
        if not self._form.thinks and THINK.startswith(known.lstrip()):
            return []  # it may begin a thought
        thought, rest = split_thought(known, self._form.thinks)
        return self._new(thought, rest) if rest else []

    def rest(self, answer: Answer) -> list[Part]:
        """New parts of the whole answer."""
        thought, rest = split_thought(answer.message.content, self._form.thinks)
        return [*self._new(thought, rest), *answer.message.calls]

    def _new(self, thought: str, rest: str) -> list[Part]:
        parts: list[Part] = []
        if thought and not self._thought_sent:
            parts.append(Thought(thought))
        self._thought_sent = True
        if rest[self._sent :]:
            parts.append(Text(rest[self._sent :]))
        self._sent = len(rest)
        return parts


async def growing(pending: Pending, form: Form) -> AsyncIterator[tuple[list[Part], Answer | None]]:
    """The parts of the only answer as they come; with the last ones the answer. Raises ApiError."""
    parts = Parts(form)
    async for found in pending.news():
        for news in found:
            if isinstance(news, Answer):
                yield parts.rest(news), news
            else:
                yield parts.grown(news.tokens), None


class Events:
    """Server-sent events with a name each. number: the key of their number; "" for none."""

    def __init__(self, number: str = ""):
        self._number = number
        self._count = 0
        self._waiting: list[str] = []

    def add(self, kind: str, **fields: Any) -> None:
        """Adds an event to those that wait."""
        body: Mapping[str, Any] = {"type": kind, **fields}
        if self._number:
            body = {**body, self._number: self._count}
        self._count += 1
        data = json.dumps(body, ensure_ascii=False, allow_nan=False)
        self._waiting.append(f"event: {kind}\ndata: {data}\n\n")

    def take(self) -> str:
        """The events that wait."""
        text = "".join(self._waiting)
        self._waiting = []
        return text


class Writer:
    """Writes one answer of an API as events.

    A subclass says how: ``begin`` comes first (with the answer, where it is whole already), then
    texts (``open_text``, ``grow``, ``close_text``) and other parts (``put``), then ``finish`` or
    ``fail``.
    """

    def __init__(self, form: Form, number: str = ""):
        self.form = form
        self.events = Events(number)
        # Number of the part in progress, or else of the next one.
        self.at = 0
        # The text so far of the part in progress; None where none is.
        self._text: str | None = None

    def part(self, part: Part) -> None:
        """Adds a part."""
        if isinstance(part, Text):
            if self._text is None:
                self.open_text()
            self._text = (self._text or "") + part.piece
            self.grow(part.piece)
            return
        self._close()
        self.put(part)
        self.at += 1

    def end(self, answer: Answer) -> None:
        """Adds what comes last."""
        self._close()
        self.finish(answer)

    def _close(self) -> None:
        if self._text is not None:
            self.close_text(self._text)
            self._text = None
            self.at += 1

    def begin(self, answer: Answer | None) -> None:
        """Adds the head."""
        raise NotImplementedError

    def open_text(self) -> None:
        """Begins a text."""
        raise NotImplementedError

    def grow(self, piece: str) -> None:
        """Adds to the text."""
        raise NotImplementedError

    def close_text(self, text: str) -> None:
        """Ends the text."""
        raise NotImplementedError

    def put(self, part: Thought | Call) -> None:
        """Adds a part that comes as a whole."""
        raise NotImplementedError

    def finish(self, answer: Answer) -> None:
        """Adds the end."""
        raise NotImplementedError

    def fail(self, error: ApiError) -> None:
        """Adds an error, after which nothing comes."""
        raise NotImplementedError


async def stream_parts(
    pending: Pending, form: Form, make: Callable[[Form], Writer]
) -> AsyncIterator[str]:
    """An answer as events. Raises ApiError where it fails before anything was sent."""
    writer = make(form)
    begun = False
    try:
        async for parts, answer in growing(pending, form):
            if not begun:
                writer.begin(answer)
                begun = True
            for part in parts:
                writer.part(part)
            if answer is not None:
                writer.end(answer)
            if said := writer.events.take():
                yield said
    except ApiError as error:
        if not begun:
            raise
        writer.fail(error)
        yield writer.events.take()
