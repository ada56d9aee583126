"""Messages of the assistant: from the tokens of one to the calls that it asks for."""

from __future__ import annotations

from collections.abc import Sequence

from models.marks import unquote
from models.tokenizer import Tokenizer
from rl_code.environment.frames import Frame
from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.tools.api import check
from rl_code.types import Limits, ToolCall


def read_message(
    tokens: Sequence[int], frame: Frame, protocol: Protocol, tokenizer: Tokenizer, limits: Limits
) -> tuple[ToolCall, ...]:
    """The calls of a message, those that cannot be carried out with their error. What it says is
    noted in its context.

    tokens: without the stop token.
    """
    decode = tokenizer.decode_quoted if protocol.tells_marks else tokenizer.decode
    body = decode(tokens)
    if frame.messages == 0:
        body = frame.task.prefill + body
    frame.said = unquote(body)
    if not protocol.tells_marks:
        body = frame.said
    goes_on = protocol.has_call(body) or protocol.thinking(body)
    frame.answered = frame.asked_by is not None and not goes_on
    parsed = [] if frame.answered else _parse(body, frame, protocol)
    return checked(parsed, frame, limits)


def _parse(body: str, frame: Frame, protocol: Protocol) -> list[ToolCall]:
    """The calls of a message; one malformed call for a text that is nested or large without end."""
    try:
        return protocol.parse(body, frame.task, frame.tools)
    except (RecursionError, MemoryError) as error:
        return [ToolCall("", {}, f"the message cannot be read: {type(error).__name__}")]


def checked(calls: Sequence[ToolCall], frame: Frame, limits: Limits) -> tuple[ToolCall, ...]:
    """The calls of a message, each with its error if it cannot be carried out.

    The arguments of a call with an error are left out. Nobody has checked how deeply the model
    nested them, and the turn's text still shows them.
    """
    found = []
    for number, call in enumerate(calls, start=1):
        if number > limits.calls:
            error = f"call {number} of a message that may hold {limits.calls}"
        else:
            error = check(call, frame.tools)
        arguments = {} if error else call.arguments
        found.append(ToolCall(call.name, arguments, error, call.id))
    return tuple(found)
