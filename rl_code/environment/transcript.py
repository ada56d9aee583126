"""The tokens of an episode's context as they come, and its turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from models.tokenizer import Tokenizer
from rl_code.environment.documents import OUTSIDE, PADDING
from rl_code.types import Context, ToolCall, ToolResult, Turn


@dataclasses.dataclass
class Transcript:
    """A context that grows: given tokens, sampled ones, given ones, and so on."""

    tokenizer: Tokenizer
    # Document number of each place (``Context.documents``); None in an episode without documents.
    documents: list[int] | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    _sampled: list[bool] = dataclasses.field(default_factory=list)
    _logprobs: list[float] = dataclasses.field(default_factory=list)
    _versions: list[int] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self._sampled)

    def copy(self) -> Transcript:
        """Another transcript of the same tokens; what is added to one is not added to the other."""
        lists = ("documents", "tokens", "turns", "_sampled", "_logprobs", "_versions")
        copies = {name: getattr(self, name) and list(getattr(self, name)) for name in lists}
        return dataclasses.replace(self, **copies)

    def add_given(
        self,
        role: Literal["prompt", "tool"],
        tokens: list[int],
        documents: list[int] | None,
        results: tuple[ToolResult, ...] = (),
    ) -> None:
        """Adds a turn of tokens that nobody sampled. documents: what each place is."""
        start = len(self)
        shown = tokens
        if documents is not None:
            shown = [id for id, kind in zip(tokens, documents, strict=True) if kind != PADDING]
        count = len(tokens)
        self._add(tokens, documents, [False] * count, [0.0] * count, [-1] * count)
        text = self.tokenizer.decode(shown) if shown else ""
        self.turns.append(Turn(role, start, len(self), text, results=results))

    def add_sampled(
        self,
        tokens: list[int],
        logprobs: list[float],
        versions: Sequence[int],
        calls: tuple[ToolCall, ...],
    ) -> None:
        """Adds a message of the assistant with its calls."""
        start = len(self)
        outside = None if self.documents is None else [OUTSIDE] * len(tokens)
        self._add(tokens, outside, [True] * len(tokens), logprobs, versions)
        text = self.tokenizer.decode(tokens)
        self.turns.append(Turn("assistant", start, len(self), text, calls=calls))

    def undo(self) -> None:
        """Takes back the last turn."""
        start = self.turns.pop().start
        for each in (self.tokens, self._sampled, self._logprobs, self._versions, self.documents):
            if each is not None:
                del each[start:]

    def sampled_at(self, place: int) -> bool:
        """True if the token at this place was sampled."""
        return self._sampled[place]

    def context(self) -> Context:
        """Record of the transcript so far."""
        return Context(
            tokens=np.array(self.tokens, np.int32),
            sampled=np.array(self._sampled, bool),
            logprobs=np.array(self._logprobs, np.float32),
            versions=np.array(self._versions, np.int32),
            documents=None if self.documents is None else np.array(self.documents, np.int32),
        )

    def _add(
        self,
        tokens: list[int],
        documents: list[int] | None,
        sampled: list[bool],
        logprobs: list[float],
        versions: Sequence[int],
    ) -> None:
        self.tokens += tokens
        self._sampled += sampled
        self._logprobs += logprobs
        self._versions += versions
        if self.documents is not None:
            self.documents += documents or []
