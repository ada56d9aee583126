"""An index over pieces of files: BM25 over their words, fused with embeddings.

Both rank all pieces, and a piece's score is the sum of 1 / (60 + rank) over the two (reciprocal
rank fusion, Cormack et al. 2009). A piece that has no word of the question has no rank by words.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from rl_code.text.lines import split_lines

if TYPE_CHECKING:
    from wordllama.inference import WordLlamaInference

_RANK = 60
# Characters of a piece that are embedded, and of a question.
_EMBEDDED = 2000
_ASKED = 1000
_WORDS_OF_PIECE = 2000
_WORD = re.compile(r"[^\W_]+")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class Chunk(NamedTuple):
    """Piece of a file, with the words and the vector by which it is found."""

    path: str
    # Counted from 1, both included.
    first: int
    last: int
    # Name of the function or class; "" for none.
    name: str
    text: str
    # The words of the text (``words_of``), with spaces between them.
    words: str
    # Embedding of the text, of length 1 or 0.
    vector: Float32[np.ndarray, " D"]


def words_of(text: str) -> list[str]:
    """The words of a text in lower case: those of snake_case and camelCase names apart, and names
    of several words whole as well.
    """
    found = []
    for name in re.findall(r"\w+", text):
        parts = [part.lower() for word in _WORD.findall(name) for part in _parts(word)]
        found += parts
        if len(parts) > 1:
            found.append(name.lower())
    return found


def _parts(word: str) -> list[str]:
    """The words of a camelCase name; a name in other letters whole."""
    return _PARTS.findall(word) if word.isascii() else [word]


@functools.cache
def _model() -> WordLlamaInference:
    """The embeddings, whose 16 MB come with their package: nothing is downloaded."""
    import wordllama

    folder = Path(wordllama.__file__).parent
    return wordllama.WordLlama.load(cache_dir=folder, disable_download=True)


def embed(texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
    """Embeddings of length 1; 0 for a text without a known token."""
    vectors = np.asarray(_model().embed([text or " " for text in texts]), np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.where(np.isfinite(vectors), vectors, 0) / np.maximum(lengths, 1e-6)


def make_chunks(path: str, text: str, pieces: Sequence[tuple[int, int, str]]) -> list[Chunk]:
    """The chunks of a file. pieces: first line, last line and name of each; blank ones are left
    out.
    """
    lines = split_lines(text)
    kept = [
        (first, last, name, "\n".join(lines[first - 1 : last]))
        for first, last, name in pieces
        if any(line.strip() for line in lines[first - 1 : last])
    ]
    if not kept:
        return []
    vectors = embed([f"{path} {name}\n{inside}"[:_EMBEDDED] for _, _, name, inside in kept])
    return [
        Chunk(
            path,
            first,
            last,
            name,
            inside,
            " ".join(words_of(f"{path} {name} {inside}")[:_WORDS_OF_PIECE]),
            vector,
        )
        for (first, last, name, inside), vector in zip(kept, vectors, strict=True)
    ]


class Index:
    """An index over chunks, which must not be empty. It takes a time in proportion to them."""

    def __init__(self, chunks: Sequence[Chunk]):
        self.chunks = list(chunks)
        self._vectors = np.stack([chunk.vector for chunk in chunks])
        self._words = _bm25([chunk.words.split(" ") for chunk in chunks])

    def search(self, question: str, most: int) -> list[Chunk]:
        """The best chunks, the best first."""
        by_words = self.by_words(question)
        scores = np.zeros(len(self.chunks))
        _add_ranks(scores, by_words, by_words > 0)
        _add_ranks(scores, self.by_sense(question), np.ones(len(scores), bool))
        return self.best(scores, most)

    def by_words(self, question: str) -> Float32[np.ndarray, " N"]:
        """BM25 of each chunk: 0 for one that has no word of the question."""
        words = words_of(question[:_ASKED])
        known = [word for word in words if word in self._words.vocab_dict]
        scores = np.zeros(len(self.chunks), np.float32)
        return self._words.get_scores(known) if known else scores

    def by_sense(self, question: str) -> Float32[np.ndarray, " N"]:
        """The cosine of each chunk's embedding with the question's."""
        return self._vectors @ embed([question[:_ASKED]])[0]

    def best(self, scores: np.ndarray, most: int) -> list[Chunk]:
        """The chunks with the highest scores; of equal ones the first."""
        order = np.argsort(-scores, kind="stable")[:most]
        return [self.chunks[i] for i in order]


def _add_ranks(
    total: Float32[np.ndarray, " N"], scores: Float32[np.ndarray, " N"], ranked: np.ndarray
) -> None:
    """Adds 1 / (60 + rank) to the total of each chunk that is ranked."""
    # Rounded, so that what is equal but for rounding stays in the order of the files.
    order = np.argsort(-np.round(scores.astype(np.float64), 5), kind="stable")
    order = order[ranked[order]]
    total[order] += 1 / (_RANK + 1 + np.arange(len(order)))


def _bm25(words: Sequence[Sequence[str]]) -> Any:
    """BM25 over lists of words, none of which a text can lack."""
    # Imported here: its import runs a program of JAX, which must not happen before the processes
    # of a run have found each other.
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    index = bm25s.BM25()
    index.index(list(words), show_progress=False)
    return index
