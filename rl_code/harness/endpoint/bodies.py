"""Bodies and chunks of the OpenAI APIs, in which answers are sent."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from rl_code.harness.endpoint.answers import Accepted, Answer, Pending, Progress
from rl_code.harness.endpoint.chat_text import ChatText, cut_at
from rl_code.harness.endpoint.fields import ApiError, Request

# What stands for a character whose bytes have not all come, and the most tokens of one.
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
# The log-probability of a token that cannot be drawn, as OpenAI writes it.
_NEVER = -9999.0


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

    def ending(self, answer: Answer, rest: str, request: Request) -> list[dict[str, Any]]:
        """The chunks with which an answer ends. rest: text that was not sent yet."""
        chunks = [self.piece(answer.index, rest)] if rest else []
        for number, call in enumerate(answer.message.calls):
            chunks.append(
                self._chunk(answer.index, {"tool_calls": [{"index": number} | _call(call)]})
            )
        last = self._chunk(answer.index, {}, answer)
        last["logprobs"] = self._logprobs(answer, request) if request.logprobs else None
        return [*chunks, last]

    def choice(self, answer: Answer, request: Request) -> dict[str, Any]:
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
            "logprobs": self._logprobs(answer, request) if request.logprobs else None,
            "answer_id": answer.id,
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], ended: Answer | None = None
    ) -> dict[str, Any]:
        reason = ended.finish_reason if ended else None
        chunk = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        return chunk | ({"answer_id": ended.id} if ended else {})

    def _logprobs(self, answer: Answer, request: Request) -> dict[str, Any]:
        """The log-probability of each token of the content."""
        content = [
            token_body(word.text, word.logprob)
            | {"top_logprobs": [token_body(*one) for one in word.likely[: request.alternatives]]}
            for word in words_of(answer, self._text)
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

    def ending(self, answer: Answer, rest: str, request: Request) -> list[dict[str, Any]]:
        """As of ``ChatBody``."""
        return [self.choice(answer, request) | {"text": rest}]

    def choice(self, answer: Answer, request: Request) -> dict[str, Any]:
        """As of ``ChatBody``."""
        return {
            "index": answer.index,
            "text": answer.message.content,
            "finish_reason": answer.finish_reason,
            "logprobs": self._logprobs(answer, request) if request.logprobs else None,
            "answer_id": answer.id,
        }

    def _logprobs(self, answer: Answer, request: Request) -> dict[str, Any]:
        """The log-probability of each token of the text."""
        words = words_of(answer, self._text)
        count = request.alternatives
        return {
            "tokens": [word.text for word in words],
            "token_logprobs": [word.logprob for word in words],
            "top_logprobs": [dict(word.likely[:count]) for word in words] if count else None,
            "text_offset": [word.start for word in words],
        }


# How answers to requests of each kind are sent.
BODIES = {"chat": ChatBody, "completion": TextBody}


async def whole_body(pending: Pending, text: ChatText, accepted: Accepted) -> dict[str, Any]:
    """The body of an answer that is not streamed. Raises ApiError."""
    request = pending.request
    body = BODIES[request.kind](text)
    answers = await pending.whole()
    choices = [body.choice(answer, request) for answer in answers]
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
            return body.ending(news, news.message.content[before:], request)
        if request.held:
            return []
        known = settled(text.text(news.tokens), request.stop)
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


def settled(text: str, stop: Sequence[str]) -> str:
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


@dataclasses.dataclass(frozen=True)
class _Word:
    """A token as text: a replacement character for one that ends within a character."""

    text: str
    # Index of the character of the content at which it begins.
    start: int
    logprob: float
    # The most likely tokens in its place.
    likely: Sequence[tuple[str, float]]


def words_of(answer: Answer, text: ChatText) -> list[_Word]:
    """The tokens that spell an answer's content. Those behind it are left out: stop tokens, the
    text that ended the message, calls. The one in which the content ends is cut.
    """
    content = answer.message.content
    words: list[_Word] = []
    # Tokens of which the last ends within a character, and the place where the first begins.
    begun: list[int] = []
    start = 0
    for place, token in enumerate(answer.tokens):
        if token in text.stop_ids or start >= len(content):
            break
        likely = zip(*answer.alternatives[place], strict=True) if answer.alternatives else ()
        shown = [(text.raw(one), _finite(logprob)) for one, logprob in likely]
        begun.append(token)
        whole = text.text(begun)
        ends = not whole.endswith(_REPLACEMENT) or len(begun) > _LONGEST_CHARACTER
        word = text.text([token])
        if start + len(word) > len(content):
            word = word[: len(content) - start]
        words.append(_Word(word, start, _finite(answer.logprobs[place]), shown))
        if ends:
            start += len(whole)
            begun = []
    return words


def token_body(word: str, logprob: float) -> dict[str, Any]:
    """A token with its log-probability, as the APIs write it."""
    return {"token": word, "logprob": logprob, "bytes": list(word.encode())}


def _finite(logprob: float) -> float:
    """Log-probability as a number that JSON has; ``_NEVER`` for a token that cannot be drawn."""
    return float(logprob) if math.isfinite(logprob) else _NEVER


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n"
