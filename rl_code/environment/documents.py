"""Documents: runs of tokens on a context that see only themselves and are seen by what follows.

A document stands in a prompt or in the result of a tool. Its keys depend on nothing but its own
tokens and the weights, so they are computed once and used wherever the document stands. This file
is the one rule for it, which rollout and training share:

- Every place of a context is of one kind: outside of documents, inside the n-th document of the
  context (n from 1), or padding. ``Context.documents`` says which.
- A token inside a document sees the earlier tokens of the same document and nothing else. A token
  outside sees every earlier token, in documents too. Padding sees nothing and is seen by nobody.
- A document begins at a place that is a multiple of ``page`` and fills whole pages. Padding stands
  before and behind it where that is needed (``place``), so that the pages of a cache hold either
  tokens of one document or tokens outside.
- RoPE rotates a token inside a document by its place in the document, from 0. It rotates a token
  outside by ``longest`` and how many tokens outside stand before it (``rope_positions``). So a
  document's keys are the same wherever it stands, and what follows is always behind it.
- ``order``, by which causality, windows and blocks count, is the place on the context with its
  padding. A batch may leave out padding; the others keep their order.

Context limits count places, with padding: it takes room in the cache as tokens do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl_code.config.read_config import at_least, follows

# Kinds of places beside the numbers of documents, which count from 1.
OUTSIDE = 0
PADDING = -1


@dataclasses.dataclass(frozen=True)
class DocumentsConfig:
    """Settings for the parts of contexts that are documents, and for their layout."""

    # The most tokens of one document, a multiple of rollout.engine.page. A longer text is split
    # into several documents, which do not see each other. RoPE positions of what stands outside of
    # documents count from this number. None for a value that follows from the limits.
    longest: int | None = None
    # Text of fewer tokens is no document: padding it to whole pages would cost more than its keys.
    shortest: int = 16
    # True if results of tools that call them documents (``Tool.documents``) are documents. False
    # leaves only the documents that a task's messages name.
    results: bool = True
    # Documents start at multiples of this number of places and fill them.
    page: int = follows("rollout.engine.page", 32)

    def __post_init__(self):
        at_least(self, longest=1, shortest=1, page=1)
        if self.longest is not None and self.shortest > self.longest:
            raise ValueError(
                f"shortest={self.shortest} must not exceed longest={self.longest}, the most tokens "
                "of one document"
            )

    def check_page(self) -> None:
        """Raises ValueError where the longest document does not fill whole pages. It is asked once
        the page is known.
        """
        if self.longest % self.page:
            raise ValueError(
                f"documents.longest={self.longest} must be a multiple of "
                f"rollout.engine.page={self.page}, since documents fill whole pages"
            )


def place(
    pieces: Sequence[tuple[Sequence[int], bool]],
    at: int,
    number: int,
    config: DocumentsConfig,
    pad: int,
) -> tuple[list[int], list[int]]:
    """Lays pieces of text out on a context: (token ids with padding, what each place is).

    A document is at most ``longest`` tokens: a longer piece becomes several. Splitting loses no
    token, where an error or a cut would keep the agent from reading what it asked for.

    Args:
      pieces: (token ids, whether they are to be a document), in order.
      at: places of the context before the pieces.
      number: documents of the context before the pieces.
      pad: the token id that padding has.
    """
    tokens: list[int] = []
    documents: list[int] = []

    def pad_page() -> None:
        missing = -(at + len(tokens)) % config.page
        tokens.extend([pad] * missing)
        documents.extend([PADDING] * missing)

    for ids, is_document in pieces:
        if not is_document or len(ids) < config.shortest:
            tokens += ids
            documents += [OUTSIDE] * len(ids)
            continue
        for start in range(0, len(ids), config.longest):
            part = ids[start : start + config.longest]
            number += 1
            pad_page()
            tokens += part
            documents += [number] * len(part)
            pad_page()
    return tokens, documents


def rope_positions(documents: np.ndarray, longest: int) -> np.ndarray:
    """int32 [T], the positions that RoPE rotates by; 0 for padding.

    documents: int32 [T], what each place of a whole context is, from its first place on.
    """
    documents = np.asarray(documents)
    places = np.arange(len(documents), dtype=np.int32)
    # a run starts where the kind changes; every place is counted from the start of its run
    changes = np.diff(documents, prepend=PADDING - 1) != 0
    inside = places - np.maximum.accumulate(np.where(changes, places, 0))
    is_outside = documents == OUTSIDE
    outside = longest + np.cumsum(is_outside) - 1
    return np.where(is_outside, outside, np.where(documents > 0, inside, 0)).astype(np.int32)


def next_position(documents: np.ndarray, longest: int) -> int:
    """The RoPE position of a token outside of documents that follows these places."""
    return longest + int(np.sum(np.asarray(documents) == OUTSIDE))


def seen_as(documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fields of ``pallas_kernels.tokens.Tokens`` for each place: (segments, documents), int32 [T].

    Segments are 1, and 0 for padding. Outside of documents the number is TAIL, so that everything
    outside sees all documents before it and no document sees anything outside.
    """
    from pallas_kernels.tokens import TAIL  # loads jax, which commands that read records do without

    documents = np.asarray(documents, np.int32)
    segments = (documents != PADDING).astype(np.int32)
    numbers = np.where(documents == OUTSIDE, TAIL, np.maximum(documents, 0)).astype(np.int32)
    return segments, numbers


def check_layout(documents: np.ndarray, config: DocumentsConfig) -> None:
    """Raises ValueError for places of a whole context that are not as ``place`` lays them out."""
    documents = np.asarray(documents)
    page = config.page
    starts = np.flatnonzero(np.diff(documents, prepend=PADDING - 1))
    kinds = documents[starts]
    lengths = np.diff(starts, append=len(documents))
    # Padding elsewhere, or more of it, would move blocks of keys that are counted by places.
    beside = (np.append(OUTSIDE, kinds[:-1]) > 0) | (np.append(kinds[1:], OUTSIDE) > 0)
    stray = (kinds == PADDING) & ~(beside & (lengths < page))
    if stray.any():
        raise ValueError(
            f"{lengths[stray][0]} places of padding start at place {starts[stray][0]}; padding "
            f"stands before and behind documents alone, fewer than {page=} places of it"
        )
    long = (kinds > 0) & (lengths > config.longest)
    if long.any():
        raise ValueError(
            f"document {kinds[long][0]} has {lengths[long][0]} tokens; "
            f"documents.longest={config.longest} is the most"
        )
    wrong = (kinds != PADDING) & (starts % page != 0)
    if wrong.any():
        raise ValueError(
            f"a document or what follows one starts at place {starts[wrong][0]}, which is no "
            f"multiple of {page=}"
        )
    numbers = kinds[kinds > 0]
    if not np.array_equal(numbers, np.arange(1, len(numbers) + 1)):
        raise ValueError(f"documents {numbers.tolist()} are not numbered 1, 2, ... in order")
