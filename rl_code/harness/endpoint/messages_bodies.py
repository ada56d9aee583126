"""Bodies and events of the Anthropic Messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from rl_code.harness.endpoint.answers import Accepted, Answer, Pending
from rl_code.harness.endpoint.chat_text import ChatText
from rl_code.harness.endpoint.conversation import Call
from rl_code.harness.endpoint.fields import ApiError
from rl_code.harness.endpoint.messages import error_body
from rl_code.harness.endpoint.parts import Form, Part, Text, Thought, Writer, stream_parts
from rl_code.harness.endpoint.thoughts import seal, shown

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def whole_message(pending: Pending, text: ChatText, accepted: Accepted) -> dict[str, Any]:
    """The body of an answer that is not streamed. Raises ApiError."""
    form = Form.of(pending, text, accepted)
    (answer,) = await pending.whole()
    blocks = [_block(part) for part in form.parts(answer)]
    ended = {"content": blocks, "usage": _usage(form, answer), "answer_id": answer.id}
    return _head(form) | ended | _reason(form, answer)


def stream_message(pending: Pending, text: ChatText, accepted: Accepted) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    return stream_parts(pending, Form.of(pending, text, accepted), _MessageWriter)


class _MessageWriter(Writer):
    """The events of an answer."""

    def begin(self, answer: Answer | None) -> None:
        usage = {"input_tokens": 0, "output_tokens": 0}
        if answer is not None:
            usage = _usage(self.form, answer) | {"output_tokens": 0}
        self.events.add("message_start", message=_head(self.form) | {"usage": usage})

    def open_text(self) -> None:
        self._start(_block(Text("")))

    def grow(self, piece: str) -> None:
        self._delta("text_delta", text=piece)

    def close_text(self, text: str) -> None:
        self._stop()

    def put(self, part: Thought | Call) -> None:
        block = _block(part)
        if isinstance(part, Thought):
            self._start(block | {"thinking": "", "signature": ""})
            self._delta("thinking_delta", thinking=block["thinking"])
            self._delta("signature_delta", signature=block["signature"])
        else:
            self._start(block | {"input": {}})
            self._delta("input_json_delta", partial_json=part.arguments)
        self._stop()

    def finish(self, answer: Answer) -> None:
        usage = _usage(self.form, answer)
        self.events.add("message_delta", delta=_reason(self.form, answer), usage=usage)
        self.events.add("message_stop")

    def fail(self, error: ApiError) -> None:
        self.events.add("error", **{k: v for k, v in error_body(error).items() if k != "type"})

    def _start(self, block: dict[str, Any]) -> None:
        self.events.add("content_block_start", index=self.at, content_block=block)

    def _delta(self, kind: str, **fields: str) -> None:
        self.events.add("content_block_delta", index=self.at, delta={"type": kind, **fields})

    def _stop(self) -> None:
        self.events.add("content_block_stop", index=self.at)


def _head(form: Form) -> dict[str, Any]:
    return {
        "id": f"msg_{form.id}",
        "type": "message",
        "role": "assistant",
        "model": form.accepted.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _block(part: Part) -> dict[str, Any]:
    """A part as a block of the content."""
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": shown(part.raw), "signature": seal(part.raw)}
    if isinstance(part, Text):
        return {"type": "text", "text": part.piece}
    arguments = json.loads(part.arguments)
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}


def _reason(form: Form, answer: Answer) -> dict[str, Any]:
    """The reason why an answer ended."""
    stop = form.ended_by(answer)
    reason = "stop_sequence" if stop else _REASONS[answer.finish_reason]
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(form: Form, answer: Answer) -> dict[str, Any]:
    """The counts. What was read anew and what was kept are counted apart."""
    return {
        "input_tokens": answer.prompt_tokens - answer.kept_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.kept_tokens,
        "output_tokens": len(answer.tokens),
        "output_tokens_details": {"thinking_tokens": form.thought_tokens(answer)},
    }
