"""Marks: the texts that a tokenizer reads as special tokens, and how to write them as plain text.

A chat template writes marks, such as ``<|im_end|>``, around texts of others: files, answers of
tools, messages of clients. Such a text may spell marks too, and there they mean nothing. ``quote``
puts a sign behind the first character of each; the template then writes text in which its own
marks have no sign. ``Tokenizer.encode`` takes the signs out again, and reads a mark that had one as
plain text. So the boundary between the template and the texts of others holds whatever they say,
and the model reads the texts unchanged.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

# A lone surrogate: no text that an encoding can carry has one, so no text of others can.
_SIGN = "\udfff"
# Stands for a quoted character and its sign where a tokenizer looks for marks. No mark has it.
_COVER = "\ufdd1\ufdd1"
_QUOTED = re.compile(f".{_SIGN}", re.DOTALL)


def encodable(text: str) -> str:
    """The text with a question mark for each lone surrogate, which JSON can spell and no encoding
    can carry.

    This is what becomes of them where text comes in: in requests, messages of servers, answers of
    tools and of other models. Only a call of a tool that has them in its arguments is refused: its
    file or command would be another one.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def encodable_all(value: Any) -> Any:
    """A value of JSON with all texts in it ``encodable``, keys included."""
    return _in_all(value, encodable)


def unquote(text: str) -> str:
    """The text before ``Marks.quote``."""
    return text.replace(_SIGN, "")


def unquote_all(value: Any) -> Any:
    """A value of JSON before ``Marks.quote_all``."""
    return _in_all(value, unquote)


def is_quoted(text: str) -> bool:
    """True if a part of the text was quoted."""
    return _SIGN in text


def covered(text: str) -> str:
    """A text of the same length in which nothing that was quoted can be part of a mark."""
    return _QUOTED.sub(_COVER, text)


class Marks:
    """The marks of a tokenizer.

    texts: the spelling of each.
    """

    def __init__(self, texts: Iterable[str]):
        self.texts = frozenset(filter(None, texts))
        # takes the first character alone, so that marks which overlap are all found
        starts = [
            f"{re.escape(first)}(?={_either({text[1:] for text in alike})})"
            for first, alike in _by_first(self.texts)
        ]
        self._start = re.compile("|".join(starts)) if starts else None
        self._beginnings = {text[:n] for text in self.texts for n in range(1, len(text))}
        self._longest = max(map(len, self.texts), default=0)
        ends, self._insides = _without_brackets(self.texts)
        self._end = re.compile("|".join(map(re.escape, sorted(ends)))) if ends else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Marks) and self.texts == other.texts

    def __hash__(self) -> int:
        return hash(self.texts)

    def quote(self, text: str, behind: str = "") -> str:
        """A text of others, in which ``Tokenizer.encode`` finds no mark.

        behind: the marks that follow the text; "" where anything may. Quoted are also the beginning
        of a mark at the end of the text, where the rest may follow, and a mark without the brackets
        in front or around it, which a template may write. Lone surrogates become question marks
        (``encodable``).
        """
        text = encodable(text)
        if self._start is None:
            return text
        places = [found.start() for found in self._start.finditer(text)]
        last = range(max(0, len(text) - self._longest + 1), len(text))
        places += [place for place in last if self._goes_on(text[place:], behind)]
        if text in self._insides or (self._end is not None and self._end.match(text)):
            places.append(0)
        pieces = []
        at = 0
        for place in sorted(set(places)):
            pieces += [text[at : place + 1], _SIGN]
            at = place + 1
        return "".join([*pieces, text[at:]])

    def _goes_on(self, text: str, behind: str) -> bool:
        """True if a text may be the beginning of a mark that ends in what follows."""
        if text not in self._beginnings or not behind:
            return text in self._beginnings
        whole = text + behind
        return whole in self._beginnings or any(map(whole.startswith, self.texts))

    def quote_all(self, value: Any) -> Any:
        """A value of JSON with all texts in it quoted, keys included."""
        return _in_all(value, self.quote)


def _either(texts: set[str]) -> str:
    """A regular expression for the beginning of a text with one of these. What several begin with
    stands in it once, since tokenizers have hundreds of marks that differ in a number.
    """
    if "" in texts:
        return ""
    parts = []
    for _, alike in _by_first(texts):
        # the first and the last in order share no more than all of them
        pairs = zip(alike[0], alike[-1], strict=False)
        shared = "".join(
            letter for letter, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        )
        parts.append(re.escape(shared) + _either({text[len(shared) :] for text in alike}))
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _by_first(texts: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Texts in order, by their first character."""
    for first, alike in itertools.groupby(sorted(texts), lambda text: text[0]):
        yield first, list(alike)


def _in_all(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with each text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_in_all(key, change): _in_all(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_in_all(each, change) for each in value]
    return value


def _without_brackets(texts: Iterable[str]) -> tuple[set[str], set[str]]:
    """The marks without some of the signs in front, and without some on both sides."""
    ends: set[str] = set()
    insides: set[str] = set()
    for text in texts:
        words = [place for place, letter in enumerate(text) if letter.isalnum()]
        first, last = (words[0], words[-1]) if words else (len(text) - 1, 0)
        cut = [text[start:] for start in range(1, first + 1)]
        ends.update(cut)
        insides.update(
            each[: len(each) - behind] for each in cut for behind in range(1, len(text) - last)
        )
    return ends, insides - {""}
