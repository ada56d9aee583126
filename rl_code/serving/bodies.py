"""Bodies and chunks of the OpenAI APIs, in which answers are sent."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from rl_code.serving.answers import Accepted, Answer, Pending, Progress
from rl_code.serving.chat_text import ChatText, cut_at
from rl_code.serving.fields import ApiError

# What stands for a character whose bytes have not all come.
_REPLACEMENT = "\ufffd"


class ChatBody:
    """The shape of chats."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, text: ChatText):
        self._text = text

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The chunks with which an answer begins."""
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """A chunk of further text."""
        return self._chunk(index, {"content": text})

    def ending(self, answer: Answer, rest: str, logprobs: bool) -> list[dict[str, Any]]:
        """The chunks with which an answer ends. rest: text that was not sent yet."""
        chunks = [self.piece(answer.index, rest)] if rest else []
        for number, call in enumerate(answer.message.calls):
            chunks.append(
                self._chunk(answer.index, {"tool_calls": [{"index": number} | _call(call)]})
            )
        last = self._chunk(answer.index, {}, answer)
        last["logprobs"] = self._logprobs(answer) if logprobs else None
        return [*chunks, last]

    def choice(self, answer: Answer, logprobs: bool) -> dict[str, Any]:
        """An answer that is not streamed."""
        calls = answer.message.calls
        content = answer.message.content
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": answer.index,
            "message": message,
            "finish_reason": answer.finish_reason,
            "logprobs": self._logprobs(answer) if logprobs else None,
            "answer_id": answer.id,
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], ended: Answer | None = None
    ) -> dict[str, Any]:
        reason = ended.finish_reason if ended else None
        chunk = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        return chunk | ({"answer_id": ended.id} if ended else {})

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        """The log-probability of each token of the message but the stop token."""
        content = [
            {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}
            for word, logprob in _words(answer, self._text)
        ]
        return {"content": content, "refusal": None}


class TextBody:
    """The shape of completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, text: ChatText):
        self._text = text

    def opening(self, index: int) -> list[dict[str, Any]]:
        """As of ``ChatBody``: none."""
        return []

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """As of ``ChatBody``."""
        return {"index": index, "text": text, "finish_reason": None, "logprobs": None}

    def ending(self, answer: Answer, rest: str, logprobs: bool) -> list[dict[str, Any]]:
        """As of ``ChatBody``."""
        return [self.choice(answer, logprobs) | {"text": rest}]

    def choice(self, answer: Answer, logprobs: bool) -> dict[str, Any]:
        """As of ``ChatBody``."""
        return {
            "index": answer.index,
            "text": answer.message.content,
            "finish_reason": answer.finish_reason,
            "logprobs": self._logprobs(answer) if logprobs else None,
            "answer_id": answer.id,
        }

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        """The log-probability of each sampled token but the stop token."""
        words = _words(answer, self._text)
        offsets = [0]
        for word, _ in words:
            offsets.append(offsets[-1] + len(word))
        return {
            "tokens": [word for word, _ in words],
            "token_logprobs": [logprob for _, logprob in words],
            "top_logprobs": None,
            "text_offset": offsets[:-1],
        }


# How answers to requests of each kind are sent.
BODIES = {"chat": ChatBody, "completion": TextBody}


async def whole_body(pending: Pending, text: ChatText, accepted: Accepted) -> dict[str, Any]:
    """The body of an answer that is not streamed. Raises ApiError."""
    request = pending.request
    body = BODIES[request.kind](text)
    answers = await pending.whole()
    choices = [body.choice(answer, request.logprobs) for answer in answers]
    head = _head(accepted, body.kind) | {"system_fingerprint": f"version_{answers[0].version}"}
    return head | {"choices": choices, "usage": _usage(answers)}


async def stream(pending: Pending, text: ChatText, accepted: Accepted) -> AsyncIterator[str]:
    """The answers as server-sent events. Text is sent as it is sampled, as far as it cannot become
    something else: with tools, or where a text may end the message, parts wait.
    """
    request = pending.request
    body = BODIES[request.kind](text)
    head = _head(accepted, body.chunk_kind)
    # Of each answer the characters that were sent, and of all the answers that are whole.
    sent = [0] * request.n
    answers: list[Answer] = []

    def choices(news: Progress | Answer) -> list[dict[str, Any]]:
        before = sent[news.index]
        if isinstance(news, Answer):
            answers.append(news)
            return body.ending(news, news.message.content[before:], request.logprobs)
        if request.held:
            return []
        known = _settled(text.text(news.tokens), request.stop)
        if len(known) <= before:
            return []
        sent[news.index] = len(known)
        return [body.piece(news.index, known[before:])]

    def events(found: Iterable[dict[str, Any]]) -> str:
        return "".join(_event(head | {"choices": [choice]}) for choice in found)

    if opening := events(each for index in range(request.n) for each in body.opening(index)):
        yield opening
    # What comes at once is sent at once; the end of the last answer is, with all that follows it.
    rest = ""
    try:
        async for found in pending.news():
            rest = events(choice for news in found for choice in choices(news))
            if rest and len(answers) < request.n:
                yield rest
        if request.include_usage:
            rest += _event(head | {"choices": [], "usage": _usage(answers)})
    except ApiError as error:
        rest = _event(error.body)
    yield rest + "data: [DONE]\n\n"


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """The counts, as the API writes them. The prompt of several answers is counted once."""
    prompt = answers[0].prompt_tokens
    sampled = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].kept_tokens},
    }


def _settled(text: str, stop: Sequence[str]) -> str:
    """The part of a growing text that stays what it is."""
    text = cut_at(text, stop).rstrip(_REPLACEMENT)
    longest = max((len(each) - 1 for each in stop), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(each.startswith(text[-length:]) for each in stop):
            return text[:-length]
    return text


def _head(accepted: Accepted, kind: str) -> dict[str, Any]:
    created = int(time.time())
    return {"id": accepted.id, "object": kind, "created": created, "model": accepted.model}


def _call(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _words(answer: Answer, text: ChatText) -> list[tuple[str, float]]:
    """The text and the log-probability of each token but stop tokens."""
    pairs = zip(answer.tokens, answer.logprobs, strict=True)
    return [
        (text.text([token]), float(logprob))
        for token, logprob in pairs
        if token not in text.stop_ids
    ]


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
