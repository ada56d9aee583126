"""Answers that must be JSON of some schema: which tokens may come next.

``llguidance`` keeps the state of a parser for each answer and says after each token which tokens
can follow it. It runs on the text of tokens, so a schema holds for every tokenizer. Its limits
bound the time and the memory that a schema can cost.
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

# The longest error about a schema, in characters.
_LONGEST_ERROR = 200


class Grammars:
    """Makes the state of answers of a schema. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int]):
        """stop_ids: the tokens of which one may follow a whole answer."""
        self._tokenizer = tokenizer
        self._stop_ids = sorted(stop_ids)
        self._lock = threading.Lock()

    def start(self, schema: str, count: int) -> list[Answer]:
        """The states of so many new answers.

        schema: a JSON schema as text. Raises ValueError for one that cannot be followed.
        """
        first = self._matcher(schema)
        others = [first.deep_copy() for _ in range(count - 1)]
        return [Answer(one, self._stop_ids) for one in (first, *others)]

    def misfit(self, schema: Mapping[str, Any], value: Any) -> str:
        """Reason why a value does not match a schema; "" if it does."""
        try:
            matcher = self._matcher(json.dumps(schema))
        except ValueError as error:
            return str(error)
        tokens = self._words.tokenize_str(json.dumps(value, ensure_ascii=False))
        fits = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        return "" if fits else "the arguments do not have the tool's schema"

    def _matcher(self, schema: str) -> Any:
        from llguidance import LLMatcher

        with self._lock:
            words = self._words
        matcher = LLMatcher(words, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if error := matcher.get_error():
            raise ValueError(f"the schema cannot be followed: {error[:_LONGEST_ERROR]}")
        return matcher

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
