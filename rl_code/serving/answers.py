"""What the endpoint answers: bodies and chunks of the OpenAI chat API."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rl_code.serving.chat_text import ChatText, cut_at
from rl_code.serving.requests import ApiError, ChatRequest, Message

# What stands for a character whose bytes have not all come.
_REPLACEMENT = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Answer:
    """A sampled message, and what it took."""

    id: str
    model: str
    message: Message
    # Why it ended: "stop", "length" or "tool_calls".
    finish_reason: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    # Tokens that the model read, and those of them whose exchange was kept.
    prompt_tokens: int
    kept_tokens: int
    # Version of the weights that sampled the last token.
    version: int

    @property
    def usage(self) -> dict[str, Any]:
        """The counts, as the API writes them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.tokens),
            "total_tokens": self.prompt_tokens + len(self.tokens),
            "prompt_tokens_details": {"cached_tokens": self.kept_tokens},
        }


class Pending:
    """A request that waits for its answer. Made in the server's event loop; the other methods may
    be called from any thread.
    """

    def __init__(self, request: ChatRequest):
        self.request = request
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[list[int] | Answer | ApiError] = asyncio.Queue()

    def sampled(self, tokens: Sequence[int]) -> None:
        """All tokens of the message so far."""
        if self.request.stream:
            self._put(list(tokens))

    def answer(self, answer: Answer) -> None:
        """The message is whole."""
        self._put(answer)

    def fail(self, error: ApiError) -> None:
        """There will be no message."""
        self._put(error)

    def _put(self, event: list[int] | Answer | ApiError) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the server was closed, so nobody waits
            pass

    async def events(self) -> AsyncIterator[list[int] | Answer]:
        """What comes, up to the answer. Raises ApiError."""
        while True:
            event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            yield event
            if isinstance(event, Answer):
                return


def whole_body(answer: Answer, text: ChatText, logprobs: bool) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content or None}
    if answer.message.calls:
        message["tool_calls"] = [_call(call) for call in answer.message.calls]
    else:
        message["content"] = answer.message.content
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer, text) if logprobs else None,
    }
    head = _head(answer.id, answer.model, "chat.completion", answer.version)
    return head | {"choices": [choice], "usage": answer.usage}


async def stream(pending: Pending, text: ChatText, id: str, model: str) -> AsyncIterator[str]:
    """The answer as server-sent events. Text is sent as it is sampled, as far as it cannot become
    something else: with tools, or where a text may end the message, parts wait.
    """
    request = pending.request
    sent = ""
    head = _head(id, model, "chat.completion.chunk", None)

    def chunk(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return _event(head | {"choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    try:
        async for event in pending.events():
            if isinstance(event, Answer):
                rest = event.message.content[len(sent) :]
                if rest:
                    yield chunk({"content": rest})
                for index, call in enumerate(event.message.calls):
                    yield chunk({"tool_calls": [{"index": index} | _call(call)]})
                logprobs = _logprobs(event, text) if request.logprobs else None
                yield chunk({}, event.finish_reason, logprobs)
                if request.include_usage:
                    yield _event(head | {"choices": [], "usage": event.usage})
            elif not request.tools:
                known = _settled(text.text(event), request.stop)
                if len(known) > len(sent):
                    yield chunk({"content": known[len(sent) :]})
                    sent = known
    except ApiError as error:
        yield _event(error.body)
    yield "data: [DONE]\n\n"


def _settled(text: str, stop: Sequence[str]) -> str:
    """The part of a growing text that stays what it is."""
    text = cut_at(text, stop).rstrip(_REPLACEMENT)
    longest = max((len(each) - 1 for each in stop), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(each.startswith(text[-length:]) for each in stop):
            return text[:-length]
    return text


def _head(id: str, model: str, kind: str, version: int | None) -> dict[str, Any]:
    head = {"id": id, "object": kind, "created": int(time.time()), "model": model}
    return head | ({} if version is None else {"system_fingerprint": f"version_{version}"})


def _call(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(answer: Answer, text: ChatText) -> dict[str, Any]:
    """The log-probability of each token of the message but the stop token."""
    pairs = zip(answer.tokens, answer.logprobs, strict=True)
    content = []
    for token, logprob in pairs:
        if token not in text.stop_ids:
            word = text.text([token])
            content.append(
                {
                    "token": word,
                    "logprob": float(logprob),
                    "bytes": list(word.encode()),
                    "top_logprobs": [],
                }
            )
    return {"content": content, "refusal": None}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
