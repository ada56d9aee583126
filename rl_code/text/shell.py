"""Commands as a shell takes them and people read them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

# What a shell reads within double quotes as something else.
_SPECIAL = frozenset('"$`\\!')


def command_line(words: Iterable[str]) -> str:
    """The words of a command as one line. As ``shlex.join``, but for words with single quotes, such
    as values of configs: they stand in double quotes where that means the same.
    """
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    return f'"{word}"' if "'" in word and not _SPECIAL & set(word) else shlex.quote(word)
