"""Messages of a conversation, and the results of tools bound to the calls that they answer."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

from models.marks import Marks
from rl_code.harness.endpoint.fields import refuse, show
from rl_code.harness.endpoint.thoughts import says_the_same


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a tool in a message, as the API writes it."""

    id: str
    name: str
    # JSON.
    arguments: str

    @property
    def content(self) -> tuple[str, Any]:
        """Name and parsed arguments, which are equal for two calls that are the same."""
        return self.name, json.loads(self.arguments)


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of a conversation, without what says nothing to the model."""

    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    # The call that a message of the role "tool" answers.
    call_id: str = ""
    # Name of the speaker, if the request gives one.
    name: str = ""
    # Where the documents of the content begin and end (``environment.documents``), in characters.
    # None where the content is one text and nothing says whether it is a document.
    spans: tuple[tuple[int, int], ...] | None = None

    @property
    def documents(self) -> list[str]:
        """The texts of its documents, in order."""
        return [self.content[start:end] for start, end in self.spans or ()]

    def same_as(self, other: Message) -> bool:
        """True if two messages say the same. Agents write their history anew: white space at the
        ends of the text, and that of JSON, does not count, nor does a thought that the other one
        lacks.
        """
        thinks = self.role == "assistant" and says_the_same(self.content, other.content)
        return (
            self.role == other.role
            and (thinks or self.content.strip() == other.content.strip())
            and self.documents == other.documents
            and [call.content for call in self.calls] == [call.content for call in other.calls]
            and self.call_id == other.call_id
            and self.name == other.name
        )

    def for_template(self, marks: Marks, instead: str | None = None) -> dict[str, Any]:
        """Message as chat templates read it. marks: of the tokenizer, quoted in all texts sent.
        instead: stands in place of each document; None to leave documents where they are.
        """
        content = marks.quote(self.content)
        if instead is not None and self.spans:
            places = [0, *itertools.chain(*self.spans), len(self.content)]
            around = [self.content[a:b] for a, b in zip(places[::2], places[1::2], strict=True)]
            content = instead.join(map(marks.quote, around))
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.name:
            message["name"] = marks.quote(self.name)
        if self.calls:
            contents = [call.content for call in self.calls]
            called = [{"name": name, "arguments": arguments} for name, arguments in contents]
            message["tool_calls"] = [
                {"type": "function", "function": marks.quote_all(each)} for each in called
            ]
        return message


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with the results of each message's calls in the order of these calls.

    Chat templates write results without ids, so the model tells them apart by their order. Raises
    ApiError for a result of a call that is not there or has one already, and for a call without a
    result where others have one, or a later message stands.
    """
    ordered: list[Message] = []
    at = 0
    while at < len(messages):
        if messages[at].role == "tool":  # behind no message that it could answer
            _bound([], messages[at : at + 1], at)
        ordered.append(messages[at])
        calls = messages[at].calls
        at += 1
        first = at
        while at < len(messages) and messages[at].role == "tool":
            at += 1
        ordered += _bound([call.id for call in calls], messages[first:at], first)
        if calls and (at > first or at < len(messages)):
            answered = {message.call_id for message in messages[first:at]}
            for call in calls:
                if call.id not in answered:
                    why = f"the call {show(call.id)} has no result behind its message"
                    raise refuse(f"messages[{min(at, len(messages) - 1)}]", why)
    return ordered


def _bound(ids: Sequence[str], results: Sequence[Message], first: int) -> list[Message]:
    """The results of calls in the order of their ids. first: the number of the first message."""
    if len(set(ids)) < len(ids):
        raise refuse(f"messages[{first - 1}].tool_calls", "two calls have the same id")
    found: dict[str, Message] = {}
    for number, result in enumerate(results, first):
        param = f"messages[{number}].tool_call_id"
        if result.call_id not in ids:
            raise refuse(param, f"{show(result.call_id)} is no call of the message before it")
        if result.call_id in found:
            raise refuse(param, f"{show(result.call_id)} has a result already")
        found[result.call_id] = result
    return [found[id] for id in ids if id in found]
