"""Recall over documents: which value was a key given, in one of many files full of noise?

A row is D documents of equal length and a tail. A document starts with FILE. It holds facts, SET
key value, between words of noise. Every key of a row is given one value, once. The tail asks for
some of the keys, GET key value. Only the values in the tail are learned and scored, and each can be
known only from the document that holds it. The tail asks for at most half of the keys: otherwise
the last values could be guessed from what was not yet asked for. Positions, by which RoPE rotates,
may have gaps between documents, so that a short row already has the distances of a long one.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from pallas_kernels.tokens import TAIL, Tokens

# Token ids; keys, values and noise follow.
PAD, FILE, SET, GET = range(4)
_FACT = 3  # tokens of SET key value and of GET key value


@dataclasses.dataclass(frozen=True)
class RecallConfig:
    """Sizes of the rows and of the vocabularies."""

    # Documents of a row in training.
    documents: int
    # Tokens of a document.
    document_tokens: int
    # Facts of a document.
    facts: int
    # The most facts that a tail asks for.
    asked: int
    # How many different keys, values and words of noise there are.
    keys: int
    values: int
    noise: int
    # How many times as many tokens as a row in training a long row has.
    longer: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise ValueError(f"recall: {field.name}={value} must be positive")
        if self.facts > (self.document_tokens - 1) // _FACT:
            raise ValueError(
                f"recall: facts={self.facts} of 3 tokens do not fit in {self.document_tokens} "
                "tokens"
            )
        if self.facts < 2:
            raise ValueError(
                f"recall: facts={self.facts} must be at least 2, of which half may be asked for"
            )
        if self.asked > self.documents * self.facts // 2:
            raise ValueError(
                f"recall: asked={self.asked} is more than half of {self.documents * self.facts} "
                "facts"
            )
        if self.keys < self.many * self.facts:
            raise ValueError(
                f"recall: keys={self.keys} must be at least the {self.many * self.facts} of a long "
                "row"
            )

    @property
    def vocabulary(self) -> int:
        """Entries of the vocabulary."""
        return GET + 1 + self.keys + self.values + self.noise

    @property
    def tail_tokens(self) -> int:
        """Whole documents' length, so that every part of a row starts at a multiple of it."""
        return -(-self.asked * _FACT // self.document_tokens) * self.document_tokens

    def tokens(self, documents: int) -> int:
        """Length of a row."""
        return documents * self.document_tokens + self.tail_tokens

    @property
    def many(self) -> int:
        """Documents of a long row."""
        return (
            self.longer * self.tokens(self.documents) - self.tail_tokens
        ) // self.document_tokens


def recall_rows(
    config: RecallConfig,
    rng: np.random.Generator,
    rows: int,
    documents: int,
    *,
    apart: bool,
    positions: Literal["sequential", "shared"],
    span: int = 0,
) -> tuple[np.ndarray, np.ndarray, Tokens, np.ndarray]:
    """(tokens, positions, where, mask), [rows, T] each, T = ``config.tokens(documents)``; the mask
    marks the answers.

    apart: whether a document sees only itself (squid), or everything before it. positions: with
    "shared", every document starts at 0 and the tail after the longest, so that the order of the
    documents does not matter. With "sequential", they follow one another. Random gaps between them
    spread the row over ``span`` positions, if that is more than it has tokens.
    """
    c = config
    length = config.tokens(documents)
    keys = GET + 1
    values = GET + 1 + c.keys
    noise = GET + 1 + c.keys + c.values
    facts = documents * c.facts
    key = keys + np.argsort(rng.random((rows, c.keys)), axis=1)[:, :facts].reshape(
        rows, documents, c.facts
    )
    value = values + rng.integers(0, c.values, key.shape)
    body = rng.integers(noise, noise + c.noise, (rows, documents, c.document_tokens))
    body[..., 0] = FILE
    room = (c.document_tokens - 1) // _FACT
    at = 1 + _FACT * np.sort(
        np.argsort(rng.random((rows, documents, room)), axis=2)[..., : c.facts], axis=2
    )
    for offset, part in enumerate((np.full_like(key, SET), key, value)):
        np.put_along_axis(body, at + offset, part, axis=2)
    count = min(c.asked, facts // 2)
    asked = np.argsort(rng.random((rows, facts)), axis=1)[:, :count]
    tail = np.full((rows, c.tail_tokens), PAD)
    mask = np.zeros((rows, length), np.float32)
    for offset, part in enumerate(
        (GET, *(np.take_along_axis(x.reshape(rows, -1), asked, 1) for x in (key, value)))
    ):
        tail[:, offset : _FACT * count : _FACT] = part
    tokens = np.concatenate([body.reshape(rows, -1), tail], axis=1).astype(np.int32)
    mask[:, length - c.tail_tokens + _FACT - 1 : length - c.tail_tokens + _FACT * count : _FACT] = (
        1.0
    )

    order = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    zeros = np.zeros_like(tokens)
    number = np.minimum(order // c.document_tokens, documents) + 1
    numbers = np.where(number > documents, TAIL, number)
    where = Tokens(
        (tokens != PAD).astype(np.int32),
        zeros,
        (numbers if apart else zeros).astype(np.int32),
        order,
    )
    if positions == "shared":
        in_document = order % c.document_tokens
        at_tail = c.document_tokens + order - documents * c.document_tokens
        return tokens, np.where(numbers == TAIL, at_tail, in_document).astype(np.int32), where, mask
    free = max(span - length, 0)
    starts = np.sort(rng.integers(0, free + 1, (rows, documents + 1)), axis=1)
    return (
        tokens,
        order + np.take_along_axis(starts, number - 1, axis=1).astype(np.int32),
        where,
        mask,
    )
