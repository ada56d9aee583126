"""Bodies and events of the OpenAI Responses API."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rl_code.harness.endpoint.answers import Accepted, Answer, Pending
from rl_code.harness.endpoint.bodies import token_body, words_of
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.conversation import Call
from rl_code.harness.endpoint.fields import ApiError
from rl_code.harness.endpoint.parts import Form, Part, Text, Thought, Writer, stream_parts
from rl_code.harness.endpoint.responses import ResponsesRequest
from rl_code.harness.endpoint.thoughts import seal, shown


async def whole_response(pending: Pending, text: ChatText, accepted: Accepted) -> dict[str, Any]:
    """The body of an answer that is not streamed. Raises ApiError."""
    form = Form.of(pending, text, accepted)
    (answer,) = await pending.whole()
    return _Response(form).whole(answer)


def stream_response(pending: Pending, text: ChatText, accepted: Accepted) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    return stream_parts(pending, Form.of(pending, text, accepted), _ResponseWriter)


class _Response:
    """The objects that an answer consists of."""

    def __init__(self, form: Form):
        self._form = form
        assert isinstance(form.request, ResponsesRequest)
        self._request = form.request
        self._created = int(time.time())

    def head(self, status: str) -> dict[str, Any]:
        """The response without its output."""
        echo = {key: value for key, value in self._request.echo.items() if value is not None}
        defaults = dict(
            instructions=None,
            max_output_tokens=None,
            metadata={},
            parallel_tool_calls=True,
            temperature=None,
            tool_choice="auto",
            tools=[],
            top_p=None,
        )
        return {
            "id": f"resp_{self._form.id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._form.accepted.model,
            "output": [],
            "previous_response_id": None,
            "truncation": "disabled",
            "usage": None,
            **defaults,
            **echo,
        }

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The response with all its output."""
        parts = self._form.parts(answer)
        items = [self.item(part, number, answer) for number, part in enumerate(parts)]
        return self.ended(answer, items)

    def ended(self, answer: Answer, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The response at its end."""
        cut = answer.finish_reason == "length"
        about = {
            "answer_id": answer.id,
            "output": [*items],
            "usage": _usage(answer, self._form.thought_tokens(answer)),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        }
        return self.head("incomplete" if cut else "completed") | about

    def item(self, part: Part, number: int, answer: Answer | None) -> dict[str, Any]:
        """A part as an item of the output."""
        id = f"{self._form.id}_{number}"
        if isinstance(part, Thought):
            words = [{"type": "reasoning_text", "text": shown(part.raw)}]
            sealed = {"encrypted_content": seal(part.raw), "status": "completed"}
            return {"type": "reasoning", "id": f"rs_{id}", "summary": [], "content": words} | sealed
        if isinstance(part, Text):
            content = [self.content(part.piece, answer)]
            message = {"type": "message", "id": f"msg_{id}", "role": "assistant"}
            return message | {"content": content, "status": "completed"}
        return self._call(part, id)

    def content(self, text: str, answer: Answer | None = None) -> dict[str, Any]:
        """The content of a message."""
        logprobs = [] if answer is None else self._logprobs(text, answer)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _call(self, call: Call, id: str) -> dict[str, Any]:
        group = self._request.grouped.get(call.name)
        named = {"namespace": group[0], "name": group[1]} if group else {"name": call.name}
        item = {"call_id": call.id, "status": "completed", **named}
        if call.name in self._request.free:
            given = json.loads(call.arguments).get("input", "")
            return {"type": "custom_tool_call", "id": f"ctc_{id}", "input": given} | item
        return {"type": "function_call", "id": f"fc_{id}", "arguments": call.arguments} | item

    def _logprobs(self, text: str, answer: Answer) -> list[dict[str, Any]]:
        """The log-probability of each token of the text, if the request asks for them."""
        if not self._request.logprobs:
            return []
        first = len(answer.message.content) - len(text)
        return [
            token_body(word.text, word.logprob)
            | {
                "top_logprobs": [
                    token_body(*one) for one in word.likely[: self._request.alternatives]
                ]
            }
            for word in words_of(answer, self._form.text)
            if word.start >= first
        ]


class _ResponseWriter(Writer):
    """The events of an answer."""

    def __init__(self, form: Form):
        super().__init__(form, "sequence_number")
        self._response = _Response(form)
        self._items: list[dict[str, Any]] = []

    def begin(self, answer: Answer | None) -> None:
        for kind in ("created", "in_progress"):
            self.events.add(f"response.{kind}", response=self._response.head("in_progress"))

    def open_text(self) -> None:
        item = self._response.item(Text(""), self.at, None)
        begun = item | {"status": "in_progress", "content": []}
        self._item_event("added", begun)
        part = self._response.content("")
        self.events.add("response.content_part.added", part=part, **self._place(item))

    def grow(self, piece: str) -> None:
        place = self._place(self._response.item(Text(""), self.at, None))
        self.events.add("response.output_text.delta", delta=piece, logprobs=[], **place)

    def close_text(self, text: str) -> None:
        item = self._response.item(Text(text), self.at, None)
        place = self._place(item)
        self.events.add("response.output_text.done", text=text, logprobs=[], **place)
        self.events.add("response.content_part.done", part=item["content"][0], **place)
        self._done(item)

    def put(self, part: Thought | Call) -> None:
        item = self._response.item(part, self.at, None)
        begun = item | {"status": "in_progress"}
        if isinstance(part, Thought):
            self._item_event("added", begun | {"content": [], "encrypted_content": None})
            text, place = item["content"][0]["text"], self._place(item)
            self.events.add("response.reasoning_text.delta", delta=text, **place)
            self.events.add("response.reasoning_text.done", text=text, **place)
        else:
            key, kind, named = "arguments", "function_call_arguments", {"name": item["name"]}
            if item["type"] == "custom_tool_call":
                key, kind, named = "input", "custom_tool_call_input", {}
            self._item_event("added", begun | {key: ""})
            place = {"item_id": item["id"], "output_index": self.at}
            self.events.add(f"response.{kind}.delta", delta=item[key], **place)
            self.events.add(f"response.{kind}.done", **{key: item[key]}, **named, **place)
        self._done(item)

    def finish(self, answer: Answer) -> None:
        ended = self._response.ended(answer, self._items)
        self.events.add(f"response.{ended['status']}", response=ended)

    def fail(self, error: ApiError) -> None:
        told = error.body["error"]
        failed = self._response.head("failed") | {
            "error": {"code": told["code"] or told["type"], "message": told["message"]},
            "output": self._items,
        }
        self.events.add("response.failed", response=failed)

    def _done(self, item: dict[str, Any]) -> None:
        self._items.append(item)
        self._item_event("done", item)

    def _item_event(self, kind: str, item: dict[str, Any]) -> None:
        self.events.add(f"response.output_item.{kind}", item=item, output_index=self.at)

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self.at, "content_index": 0}


def _usage(answer: Answer, thought: int) -> dict[str, Any]:
    """The counts. thought: tokens of the thought."""
    read, sampled = answer.prompt_tokens, len(answer.tokens)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": answer.kept_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": read + sampled,
    }
