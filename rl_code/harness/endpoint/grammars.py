"""Answers that must have some form: which tokens may come next.

``llguidance`` keeps the state of a parser for each answer and says after each token which tokens
can follow it. It runs on the text of tokens, so a grammar holds for every tokenizer. Its limits
bound the time and the memory that a grammar can cost.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from models.tokenizer import Tokenizer

# The longest error about a grammar, and the longest grammar, in characters.
_LONGEST_ERROR = 200
_LONGEST_GRAMMAR = 1 << 17


def json_grammar(schema: str) -> str:
    """The grammar of JSON of a schema, which is given as text."""
    return f"start: %json {schema}"


class Grammars:
    """Makes the state of answers of a grammar. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int]):
        """stop_ids: the tokens of which one may follow a whole answer."""
        self._tokenizer = tokenizer
        self._stop_ids = sorted(stop_ids)
        self._lock = threading.Lock()

    def start(self, grammar: str, count: int) -> list[Answer]:
        """The states of so many new answers.

        grammar: in Lark's notation. Raises ValueError for one that cannot be followed.
        """
        first = self._matcher(grammar)
        others = [first.deep_copy() for _ in range(count - 1)]
        return [Answer(one, self._stop_ids) for one in (first, *others)]

    def misfit(self, schema: Mapping[str, Any], value: Any) -> str:
        """Reason why a value does not match a schema; "" if it does."""
        try:
            matcher = self._matcher(json_grammar(json.dumps(schema)))
        except ValueError as error:
            return str(error)
        tokens = self._words.tokenize_str(json.dumps(value, ensure_ascii=False))
        fits = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        return "" if fits else "the arguments do not have the tool's schema"

    def special(self, text: str) -> str:
        """The name in grammars of a text that is one special token; "" for other texts."""
        try:
            token = self._tokenizer.token_id(text)
        except ValueError:
            return ""
        return f"<[{token}]>" if self._locked_words().is_special_token(token) else ""

    def _matcher(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        if len(grammar) > _LONGEST_GRAMMAR:
            raise ValueError(
                f"the schema cannot be followed: {len(grammar)} characters of a grammar, at most "
                f"{_LONGEST_GRAMMAR} are read"
            )
        words = self._locked_words()
        matcher = LLMatcher(words, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if error := matcher.get_error():
            raise ValueError(f"the schema cannot be followed: {error[:_LONGEST_ERROR]}")
        return matcher

    def _locked_words(self) -> Any:
        with self._lock:
            return self._words

    @functools.cached_property
    def _words(self) -> Any:
        from llguidance import LLTokenizer

        size = self._tokenizer.vocab_size
        return LLTokenizer(self._tokenizer.to_json(), n_vocab=size, eos_token=self._stop_ids)


class Answer:
    """State of the grammar after the tokens of one answer so far."""

    def __init__(self, matcher: Any, stop_ids: Sequence[int]):
        self._matcher = matcher
        self._stop_ids = list(stop_ids)

    def read(self, tokens: Sequence[int]) -> int:
        """Read tokens up to the first one that may not follow, and return their number. At least 1:
        beyond a limit of the parser a stop token ends the answer.
        """
        return max(1, self._matcher.try_consume_tokens(list(tokens)))

    def allowed(self) -> Bool[np.ndarray, " V"]:
        """True for each token that may follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        found = np.unpackbits(bits, bitorder="little").astype(bool)
        # Beyond a limit of the parser nothing may follow: the answer ends here.
        if not found.any():
            found[self._stop_ids] = True
        return found
