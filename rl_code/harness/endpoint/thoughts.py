"""Thoughts in messages: APIs that have a place for them carry them apart from the text.

The raw text of a thought, its marks included, goes to the client beside the words that it shows,
and comes back with the history. So the message that the client sends is the one that was sampled,
and its tokens are kept.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable

from rl_code.environment.protocols.reading import THINK, THOUGHT
from rl_code.harness.endpoint.fields import ApiError, refuse


def split_thought(text: str, begins_inside: bool) -> tuple[str, str]:
    """The thought at the beginning of a message, with its marks and the white space around it, and
    the text behind.

    begins_inside: True if the prompt has opened the thought.
    """
    if not begins_inside and not text.lstrip().startswith(THINK):
        return "", text
    end = text.find(THOUGHT)
    if end < 0:
        return text, ""
    rest = text[end + len(THOUGHT) :].lstrip()
    return text[: len(text) - len(rest)], rest


def shown(thought: str) -> str:
    """The words of a thought, without marks."""
    return thought.strip().removeprefix(THINK).removesuffix(THOUGHT).strip()


def seal(thought: str) -> str:
    """The raw thought as a client keeps it, unread."""
    return base64.b64encode(thought.encode()).decode()


def unseal(sealed: str, param: str) -> str:
    """The raw thought that a client sends back. Raises ApiError."""
    try:
        return base64.b64decode(sealed.encode(), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise refuse(param, "is none of this server's") from error


def rebuilt(words: str) -> str:
    """A thought of which the client has kept the words alone."""
    return f"{THINK}\n{words.strip()}\n{THOUGHT}\n\n" if words.strip() else ""


def says_the_same(known: str, asked: str) -> bool:
    """True if two texts of an assistant's message differ in white space at the ends, or in the
    thought, which many agents leave out of their history, and nothing else.
    """
    if known.strip() == asked.strip():
        return True
    return THOUGHT in known and known.partition(THOUGHT)[2].strip() == asked.strip()


def named[T](sources: list[str], field: str, read: Callable[[], T]) -> T:
    """Return the result of ``read``; its errors name the client's own fields.

    sources: the client's name of each message that ``read`` gets. field: that of all of them.
    """
    try:
        return read()
    except ApiError as error:
        told = error.body["error"]
        for at, source in reversed([*enumerate(sources)]):
            for key, value in told.items():
                told[key] = value and value.replace(f"messages[{at}]", source)
        if told["param"] == "messages":
            told["param"] = field
        raise
