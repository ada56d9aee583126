"""Texts of messages without the marks that models put around them."""

from __future__ import annotations

import re

# What ends a message in its text: a special token, as tokenizers of all families write them.
_END = re.compile(r"<[|/]?[^<>\s]*>\s*$")


def said(text: str) -> str:
    """A message without its thoughts and the token that ends it."""
    return _END.sub("", text.rpartition("</think>")[2]).strip()
