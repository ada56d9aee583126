"""Conversations of the API as tokens, and sampled tokens as messages of the API.

Text becomes tokens once. A conversation is cut where its messages end, and each piece is tokenised
on its own, so that a later request can keep the tokens of the first messages and add others behind
them. What was sampled is never rendered: only what follows it is (``Follow``).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from models.marks import encodable_all
from models.tokenizer import Tokenizer
from rl_code.environment.documents import DocumentsConfig
from rl_code.environment.parts import MARK, encode, put_in
from rl_code.environment.protocols.protocol import Protocol, missing_end, stop_ids
from rl_code.harness.endpoint.conversation import Call, Message
from rl_code.harness.endpoint.fields import ApiError, check_depth, refuse
from rl_code.harness.endpoint.grammars import Grammars
from rl_code.harness.endpoint.requests import ChatRequest
from rl_code.types import ToolCall

# An assistant's answer in a conversation that is rendered to see what follows it.
_ANSWER = "the answer of the assistant"
# A special token at the end of a text, and at its beginning.
_ENDS = re.compile(r"<[|｜][^<>|｜]*[|｜]>\Z")
_BEGINS = re.compile(r"<[|｜][^<>|｜]*[|｜]>")
# The messages at the end of a request whose ends are looked for.
_LAST = 256
_BEFORE = ({"role": "user", "content": "go"}, {"role": "assistant", "content": _ANSWER})


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The tokens of some messages, and of the opening of the assistant's next one."""

    tokens: list[int]
    # For each message how many of the tokens stand before its end; None where the text does not
    # show where it ends, and then no later request can keep what stands before.
    ends: list[int | None]
    # What each place is (``Context.documents``); None without documents.
    kinds: list[int] | None = None


@dataclasses.dataclass(frozen=True)
class Behind:
    """Places of a context before some pieces: their number, and that of the documents there."""

    places: int = 0
    documents: int = 0


_FROM_START = Behind()


class ChatText:
    """Puts conversations into a protocol's words and back.

    documents: which parts of conversations are documents; None for a model without. document_tools:
    the tools of which a result that comes as one text is a document.
    """

    def __init__(
        self,
        protocol: Protocol,
        tokenizer: Tokenizer,
        documents: DocumentsConfig | None = None,
        document_tools: Collection[str] = (),
    ):
        self.protocol, self._tokenizer = protocol, tokenizer
        self.documents, self._document_tools = documents, document_tools
        self.stop_ids = stop_ids(protocol, tokenizer)
        self.grammars = Grammars(tokenizer, self.stop_ids)

    def marked(self, request: ChatRequest) -> ChatRequest:
        """A request whose messages say which parts of them are documents (``Message.spans``).

        Where the protocol writes the names of functions with results, results have them. Documents
        are as in training: parts that are called documents, and the results of the tools whose
        results are documents. What a tool returned is a document only where the config says so.
        """
        names = {call.id: call.name for one in request.messages for call in one.calls}

        def spans(message: Message) -> tuple[tuple[int, int], ...]:
            if self.documents is None:
                return ()
            if message.role != "tool":
                return message.spans or ()
            if not self.documents.results:
                return ()
            if message.spans is not None:
                return message.spans
            called = names.get(message.call_id, message.name)
            return ((0, len(message.content)),) if called in self._document_tools else ()

        def name(message: Message) -> str:
            if not self.protocol.names_results or message.role != "tool":
                return message.name
            return message.name or names.get(message.call_id, "")

        messages = (
            dataclasses.replace(one, spans=spans(one), name=name(one)) for one in request.messages
        )
        return dataclasses.replace(request, messages=tuple(messages))

    def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        kept: int = 0,
        behind: Behind = _FROM_START,
    ) -> Pieces:
        """A conversation, opening the assistant's next message; without the first ``kept``
        messages.

        behind: the places of those. Raises ApiError for what the protocol cannot write, and
        ValueError where the text does not show where the kept messages end.
        """
        quoted = self._tokenizer.marks.quote_all(list(tools))
        schemas = [{"type": "function", "function": schema} for schema in quoted]
        given = self._for_template(messages)
        whole = self._render(given, schemas, True)

        def written(count: int) -> str | None:
            # Templates may refuse a beginning, such as a system message alone.
            try:
                return self._render(given[:count], schemas, False)
            except ApiError:
                return None

        marks = _marks(whole, len(given), written, kept)
        start = 0
        if kept:
            if marks[kept - 1] is None:
                raise ValueError(f"the text does not show where message {kept} ends")
            start = marks[kept - 1]
        rest = [mark and mark - start for mark in marks[kept:]]
        return self._cut(whole[start:], rest, messages[kept:], behind)

    def follow(
        self, messages: Sequence[Message], *, last: int, behind: Behind = _FROM_START
    ) -> Pieces:
        """Text behind a sampled message: further messages, and the opening of the next one.

        last: the last token of the sampled message. Where it is no stop token, that is put in
        front. behind: the places of all before. Raises ApiError for what the protocol cannot write.
        """
        given = self._for_template(messages)
        ends = self.protocol.stop_tokens
        ends = ends if self.protocol.opens_next else ends[:1]

        def after(count: int, opening: bool) -> str:
            text = self._render([*_BEFORE, *given[:count]], (), opening)
            return text.partition(_ANSWER)[2]

        whole = after(len(given), True)
        end = next((each for each in ends if whole.startswith(each)), None)
        if end is None:
            raise ApiError(f"the chat template does not end a message with {ends[0]!r}")

        def written(count: int) -> str | None:
            text = after(count, False)
            return text.removeprefix(end) if text.startswith(end) else None

        whole = whole.removeprefix(end)
        marks = _marks(whole, len(given), written)
        closed = missing_end(self.protocol, self.raw(last) if last in self.stop_ids else "", end)
        places = [mark and mark + len(closed) for mark in marks]
        return self._cut(closed + whole, places, messages, behind)

    def read(
        self,
        tokens: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
        name: str,
        stop: Sequence[str] = (),
        *,
        may_be_json: bool = False,
    ) -> tuple[Message, tuple[ToolCall, ...]]:
        """A sampled message as the API writes it, and its calls as a trajectory records them.

        Where a call cannot be read, all of the text is the content, and the agent may say what is
        wrong with it. name: begins the ids of the calls. stop: texts of which the first that
        occurs ends the message. may_be_json: True if the message is JSON unless it is calls.
        """
        text = cut_at(self.text(tokens), stop)
        if not tools or (may_be_json and is_json(text)) or not self.protocol.has_call(text):
            return Message("assistant", text), ()
        declared = declared_tools(tools)
        try:
            calls = self.protocol.parse(text, None, declared)
        except (RecursionError, MemoryError) as error:
            calls = [ToolCall("", {}, f"the message cannot be read: {type(error).__name__}")]
        if tokens[-1] not in self.stop_ids and not self.protocol.settled(text):
            calls = [ToolCall("", {}, "the message was cut inside of a call")]
        calls = [_of(call, declared, self.grammars) for call in calls]
        if any(call.error for call in calls):
            return Message("assistant", text), tuple(calls)
        numbers = [call.id.rpartition(":")[2] or str(at) for at, call in enumerate(calls)]
        if len({*numbers}) < len(numbers):
            numbers = [str(at) for at in range(len(calls))]
        written = tuple(
            Call(f"{name}_{number}", call.name, json.dumps(call.arguments, ensure_ascii=False))
            for number, call in zip(numbers, calls, strict=True)
        )
        return Message("assistant", self.protocol.before_calls(text), written), tuple(calls)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens without the stop token."""
        return self._tokenizer.decode([id for id in tokens if id not in self.stop_ids])

    def raw(self, token: int) -> str:
        """The text of one token, of a stop token too."""
        return self._tokenizer.decode([token])

    def _render(
        self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Any], opening: bool
    ) -> str:
        try:
            return self.protocol.conversation(messages, schemas, opening)
        except ValueError as error:
            raise ApiError(str(error), code="unsupported_value", param="messages") from error

    def _for_template(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        instead = None if self.documents is None else MARK
        written = [message.for_template(self._tokenizer.marks, instead) for message in messages]
        if self.protocol.numbers_calls:
            for message, given in zip(messages, written, strict=True):
                given["tool_call_id"] = message.call_id
        return written

    def _cut(
        self,
        text: str,
        marks: Sequence[int | None],
        messages: Sequence[Message],
        behind: Behind,
    ) -> Pieces:
        """Tokenises a text piece by piece. It is cut only beside special tokens, where the pieces
        have the tokens of the whole, and never right behind a document.

        marks: where each of the messages ends.
        """
        inside = [] if self.documents is None else self._documents_of(messages)
        if text.count(MARK) != len(inside):
            raise refuse(
                "messages",
                f"the chat template writes {text.count(MARK)} of {len(inside)} documents as they "
                "are; send them as text",
                "unsupported_value",
            )
        tokens: list[int] = []
        kinds: list[int] = []
        ends: list[int | None] = []
        at, number = 0, behind.documents
        for mark in [*marks, len(text)]:
            last = len(ends) == len(marks)
            if not last and (
                mark is None or not self._beside_special(text, mark) or text[at:mark].endswith(MARK)
            ):
                ends.append(None)
                continue
            here = Behind(behind.places + len(tokens), number)
            more, own = self._encode(text[at:mark], inside, here)
            tokens += more
            kinds += own or []
            number = max([number, *(own or ())])
            at = mark
            if not last:
                ends.append(len(tokens))
        return Pieces(tokens, ends, None if self.documents is None else kinds)

    def _encode(
        self, text: str, inside: list[str], behind: Behind
    ) -> tuple[list[int], list[int] | None]:
        """Tokens of a text, and what each place is; takes its documents out of ``inside``."""
        count = text.count(MARK)
        own, inside[:count] = inside[:count], []
        where = dict(at=behind.places, number=behind.documents)
        try:
            return encode(put_in(text, own), self._tokenizer, self.documents, **where)
        except ValueError as error:
            raise ApiError(str(error), code="unsupported_value", param="messages") from error

    def _documents_of(self, messages: Sequence[Message]) -> list[str]:
        """The texts of all documents of messages, in order, with special tokens quoted."""
        quote = self._tokenizer.marks.quote
        return [quote(text) for message in messages for text in message.documents]

    def _beside_special(self, text: str, place: int) -> bool:
        """True if a special token ends or begins at a place, or the text ends there."""
        if place == len(text):
            return True
        beside = [_ENDS.search(text[:place]), _BEGINS.match(text[place:])]
        for found in filter(None, beside):
            try:
                self._tokenizer.token_id(found[0])
            except ValueError:
                continue
            return True
        return False


def _marks(
    whole: str, count: int, written: Callable[[int], str | None], kept: int = 0
) -> list[int | None]:
    """The end of each of ``count`` messages in the text of all; None where it does not show.

    Only the ends of the last messages are looked for, and that of message ``kept``. Each takes one
    more rendering, so the time would grow with the square of the number of messages.

    written: gives the text of so many first messages, None where they cannot be written alone.
    """
    marks: list[int | None] = [None] * count
    for number in {*range(max(1, count - _LAST + 1), count + 1), *([kept] if kept else [])}:
        text = written(number)
        if text is not None and whole.startswith(text):
            marks[number - 1] = len(text)
    return marks


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Text before the first occurrence of any stop text; the whole text without one."""
    return text[: min((text.index(each) for each in stop if each in text), default=len(text))]


def is_json(text: str) -> bool:
    """True if a message that is calls between marks, or JSON, is JSON. Its strings may hold marks,
    but it begins with none.
    """
    return not text.lstrip().startswith("<")


@dataclasses.dataclass(frozen=True)
class _Declared:
    """A tool of somebody else's, as protocols read calls of it: its schema types their values, and
    its words in the compact protocol follow from it.
    """

    schema: Mapping[str, Any]
    words: None = None

    @property
    def name(self) -> str:
        """The name in the schema."""
        return self.schema["name"]


def declared_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, _Declared]:
    """The tools of a request by their names, as protocols read calls of them."""
    return {schema["name"]: _Declared(schema) for schema in tools}


def _of(call: ToolCall, declared: Mapping[str, _Declared], grammars: Grammars) -> ToolCall:
    """A call with an error where its tool was not declared, or is strict and its arguments do not
    fit its schema; arguments of a call with an error are left out, as nobody has checked them.
    """
    error = call.error
    if not error and call.name not in declared:
        error = f"unknown tool {call.name[:40]!r}"
    try:
        if not error and encodable_all(call.arguments) != call.arguments:
            error = "the arguments are not valid Unicode"
        if not error:
            check_depth(call.arguments)  # as where the client sends the call back
    except (RecursionError, ApiError):
        error = "the arguments are nested too deeply"
    schema = {} if error else declared[call.name].schema
    if not error and schema.get("strict"):
        error = grammars.misfit(schema.get("parameters", {}), call.arguments)
    return ToolCall(call.name, {} if error else call.arguments, error, call.id)
