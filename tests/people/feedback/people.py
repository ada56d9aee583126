"""Answers and events for tests."""

from __future__ import annotations

from typing import Any

from people.feedback.records import AnswerRecord, Event


def answer(id: str = "a", user: str = "ann", **fields: Any) -> AnswerRecord:
    """An answer of two tokens."""
    standard: dict[str, Any] = {
        "session": f"session of {user}",
        "model": "tab",
        "version": 1,
        "adapter": "",
        "arm": "",
        "asked_at": 100.0,
        "answered_at": 101.0,
        "first_token_s": 0.25,
        "kind": "completion",
        "finish_reason": "stop",
        "context": 0,
        "parent": -1,
        "kept": 0,
        "given": (5, 6, 7),
        "tokens": (8, 9),
        "logprobs": (-0.1, -1 / 3),
        "versions": (1, 1),
    }
    return AnswerRecord(id, user, **{**standard, **fields})


def event(kind: str, answer: str = "a", key: str = "", at: float = 110.0, **fields: Any) -> Event:
    """An event whose key follows from its kind and answer."""
    return Event(key or f"{kind} {answer}", answer, kind, at, **fields)
