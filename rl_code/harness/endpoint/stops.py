"""A protocol whose messages also end where a request says: at some texts, behind its first call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rl_code.environment.protocols.protocol import Protocol
from rl_code.harness.endpoint.chat_text import declared_tools, is_json
from rl_code.harness.endpoint.fields import Request
from rl_code.harness.endpoint.requests import ChatRequest

# What ends a call in protocols whose messages can have several.
_CALL_END = "</tool_call>"


@dataclasses.dataclass(frozen=True)
class Stopping(Protocol):
    """Ends a message at its protocol's stop tokens, or behind the first of some texts or calls."""

    texts: tuple[str, ...] = ()
    # Protocol that reads calls, if the first call ends the message, and the tools to call.
    inner: Protocol | None = None
    tools: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # True if the message is JSON unless it is calls.
    may_be_json: bool = False

    def stopped(self, text: str) -> bool:
        return any(each in text for each in self.texts) or self._has_call(text)

    def _has_call(self, text: str) -> bool:
        """True if a text holds a whole call. The end mark may stand in an argument, so each one is
        tried.
        """
        if self.may_be_json and is_json(text):
            return False
        end = -1
        while self.inner is not None and (end := text.find(_CALL_END, end + 1)) >= 0:
            head = text[: end + len(_CALL_END)]
            try:
                calls = self.inner.parse(head, None, self.tools)
            except (RecursionError, MemoryError):
                return False
            if any(not call.error for call in calls) and self.inner.settled(head):
                return True
        return False


def stopping(protocol: Protocol, request: Request) -> Protocol:
    """The protocol as the messages of a request end."""
    one_call = isinstance(request, ChatRequest) and request.tools and not request.parallel
    if not request.stop and not one_call:
        return protocol
    return Stopping(
        stop_tokens=protocol.stop_tokens,
        verbose=protocol.verbose,
        texts=request.stop,
        inner=protocol if one_call else None,
        tools=declared_tools(request.tools) if one_call else {},
        may_be_json=bool(request.json_schema),
    )
