"""Answers that must be JSON of some schema: which tokens may come next.

``llguidance`` keeps the state of a parser for each answer and says after each token which tokens
can follow it. It runs on the text of tokens, so a schema holds for every tokenizer. Its limits
bound the time and the memory that a schema can cost.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from models.tokenizer import Tokenizer
from rl_code.serving.fields import refuse, show


class Grammars:
    """Makes the state of answers of a schema. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int]):
        """stop_ids: the tokens of which one may follow a whole answer."""
        self._tokenizer = tokenizer
        self._stop_ids = sorted(stop_ids)
        self._lock = threading.Lock()

    def start(self, schema: str, count: int) -> list[Answer]:
        """The states of so many new answers.

        schema: a JSON schema as text. Raises ApiError for one that cannot be followed.
        """
        from llguidance import LLMatcher

        with self._lock:
            words = self._words
        try:
            first = LLMatcher(words, LLMatcher.grammar_from_json_schema(schema), log_level=0)
            error = first.get_error()
        except ValueError as found:
            error = str(found)
        if error:
            why = f"the schema cannot be followed: {show(error)}"
            raise refuse("response_format", why, "unsupported_value")
        others = [first.deep_copy() for _ in range(count - 1)]
        return [Answer(one, self._stop_ids) for one in (first, *others)]

    @functools.cached_property
    def _words(self) -> Any:
        from llguidance import LLTokenizer

        size = self._tokenizer.vocab_size
        return LLTokenizer(self._tokenizer.to_json(), n_vocab=size, eos_token=self._stop_ids)


class Answer:
    """How far an answer has come."""

    def __init__(self, matcher: Any, stop_ids: Sequence[int]):
        self._matcher = matcher
        self._stop_ids = list(stop_ids)
        self._read = 0

    def allowed(self, tokens: Sequence[int]) -> Bool[np.ndarray, " V"]:
        """True for each token that may follow.

        tokens: all of the answer so far; those of the calls before come first.
        """
        self._matcher.consume_tokens(list(tokens[self._read :]))
        self._read = len(tokens)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        found = np.unpackbits(bits, bitorder="little").astype(bool)
        # Beyond a limit of the parser nothing may follow: the answer ends here.
        if not found.any():
            found[self._stop_ids] = True
        return found
