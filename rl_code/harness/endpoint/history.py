"""Calls of tools in a conversation, and the results that answer them, bound by the ids of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_code.harness.endpoint.fields import refuse, show

if TYPE_CHECKING:
    from rl_code.harness.endpoint.requests import Message


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
