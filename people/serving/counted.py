"""Counts of an agent's actions in one answer, as ``AnswerRecord.extra`` keeps them.

    "invalid_calls"  1 for an answer with a call that cannot be read or of an unknown tool, else 0
    "edits"          1 for one that calls a tool of ``edit_tools``, else 0
    "questions"      1 for one that asks the person, else 0; "question" says the same to rewards

A count that cannot be known is left out, and not taken for 0: there are no invalid calls where a
request declares no tools, and no edits where it declares none that edits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rl_code.run.serving import ServingConfig
from rl_code.types import ToolCall

# The rates among them.
RATES = ("questions", "edits", "invalid_calls")


def counted(
    calls: Sequence[ToolCall], text: str, declared: Collection[str], config: ServingConfig
) -> Mapping[str, Any]:
    """Counts of the actions in one answer of a chat.

    calls: as the protocol read them, malformed ones too. text: what the person gets to read.
    declared: names of the tools that the request offers.
    """
    called = {call.name for call in calls if not call.error}
    # Without a call the person is to answer next.
    asks = bool(called.intersection(config.ask_tools)) or (
        not calls and text.rstrip().endswith("?")
    )
    found: dict[str, Any] = {"question": asks, "questions": float(asks)}
    if declared:
        found["invalid_calls"] = float(any(call.error for call in calls))
    if not set(declared).isdisjoint(config.edit_tools):
        found["edits"] = float(bool(called.intersection(config.edit_tools)))
    return found
