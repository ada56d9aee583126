"""Spans of tokens whose keys stand on pages, the runs that they are made of, and the documents that
they hold together with others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from attention.cache.tables import Runs
from pallas_kernels.tokens import TAIL
from rl_code.environment.documents import OUTSIDE, PADDING
from rl_code.rollout.engine_config import EngineConfig


@dataclasses.dataclass
class Run:
    """Consecutive places of one kind: a document, or tokens outside of documents."""

    # The number of the document on its context, from 1; OUTSIDE for the other tokens.
    number: int
    # The place of its first token.
    start: int
    # Its tokens.
    length: int

    @property
    def end(self) -> int:
        """The place behind its last token."""
        return self.start + self.length


class ContextRuns:
    """Runs of a context, by the rule of ``environment.documents``, and the content of its pages.

    config: of the engine, in a run with documents.
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        self._runs: list[Run] = []
        # Tokens outside of documents, and places with padding.
        self._outside = 0
        self._places = 0
        # int32 [3, table], the row of each of the fields of ``tables.Runs``.
        self.pages = np.zeros((3, config.table), np.int32)
        self.pages[1] = config.page

    def add(self, kinds: Sequence[int]) -> None:
        """Further places of the context by their kinds (``Context.documents``).

        Raises ValueError for a document that does not start at a page.
        """
        for kind, places in itertools.groupby(kinds):
            count = len(list(places))
            if kind != PADDING:
                self._extend(kind, count)
            self._places += count
            self._outside += count if kind == OUTSIDE else 0

    def documents(self, end: int) -> list[Run]:
        """The documents that begin before the place ``end``."""
        return [run for run in self._runs if run.number > 0 and run.start < end]

    def at(self, place: int) -> Run:
        """The run of a place. The padding behind a run belongs to it."""
        return next(run for run in reversed(self._runs) if run.start <= place)

    def behind(self, run: Run) -> int:
        """The place behind a run and its padding."""
        page = self._config.page
        return min(-(-run.end // page) * page, self._places)

    def put(self, runs: Runs, row: int) -> None:
        """Writes what the pages hold into a row of the arrays of a dispatch."""
        runs.documents[row], runs.filled[row], runs.shifts[row] = self.pages

    def numbered(self, tokens: Sequence[int]) -> list[int]:
        """The tokens of the first places as numbers, for the hash by which pages are found.

        They differ wherever contexts differ in their tokens or in what is a document.
        """
        found = [-1] * len(tokens)  # of padding
        for run in self._runs:
            part = tokens[run.start : run.end]
            if run.number > 0:
                # the first one says that a document begins
                part = [-2 - token - (2**32 if at == 0 else 0) for at, token in enumerate(part)]
            found[run.start : run.start + len(part)] = part
        return found

    def _extend(self, kind: int, count: int) -> None:
        last = self._runs[-1] if self._runs else None
        if last and last.number == kind and last.end == self._places:
            last.length += count
            self._check_longest(last)
            return
        page = self._config.page
        if self._places % page:
            raise ValueError(
                f"document {max(kind, last.number if last else 0)}: a run of another kind begins "
                f"at place {self._places}, which must be a multiple of page={page}"
            )
        if last is not None:  # its last page has empty places, now that something follows
            self.pages[1, (last.end - 1) // page] = (last.end - 1) % page + 1
        run = Run(kind, self._places, count)
        self._runs.append(run)
        self._check_longest(run)
        # From here to the end of the table: later runs write over what is theirs.
        first = self._places // page
        position = 0 if kind > 0 else self._config.longest_document + self._outside
        self.pages[0, first:] = kind if kind > 0 else TAIL
        self.pages[2, first:] = self._places - position

    def _check_longest(self, run: Run) -> None:
        if run.number > 0 and run.length > self._config.longest_document:
            raise ValueError(
                f"document {run.number} of {run.length} tokens is longer than "
                f"longest_document={self._config.longest_document}"
            )


@dataclasses.dataclass(eq=False)
class Span:
    """Tokens whose keys and values stand on pages."""

    # All tokens that are known so far.
    tokens: list[int] = dataclasses.field(default_factory=list)
    # How many tokens the prompt has.
    prompt: int = 0
    # How many of the tokens have their keys and values in the cache.
    cached: int = 0
    # The shard whose pages the span holds.
    shard: int = 0
    # The span's number in the allocator of its shard; None while it holds no pages.
    sequence: int | None = None
    # What the pages held when the span lost them: blocks of pages, in order, each one array [pages
    # of the block, ...] for each array of the cache. None if nothing was saved.
    saved: list | None = None
    # Number of the weights with which the span's first keys were computed.
    weights: int = 0
    # Which adapter of a model that has several (``models.adapter_rows``) computes its keys; -1 for
    # none.
    adapter: int = -1
    # Whom its tokens belong to: pages are shared only with spans of the same owner.
    owner: str = ""
    # What its places are; None in a run without documents.
    runs: ContextRuns | None = None
    # The documents among its pages, in the order of the context.
    documents: list[Document] = dataclasses.field(default_factory=list)
    # The numbers of the weights that computed the keys of those of its documents that were cached
    # when it lost its pages: what was saved is put back beside documents of the same weights.
    document_weights: list[int] = dataclasses.field(default_factory=list)

    @property
    def held(self) -> bool:
        """True if it has pages."""
        return self.sequence is not None

    @property
    def salt(self) -> bytes:
        """Facts beside its tokens on which its keys depend."""
        return b"%d %d %s" % (self.weights, self.adapter, self.owner.encode())

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - self.cached

    @property
    def seen(self) -> int:
        """Number of its documents that count as cached."""
        return 0 if self.runs is None else len(self.runs.documents(self.cached))

    def add(self, tokens: Sequence[int], kinds: Sequence[int] | None = None) -> None:
        """Further tokens behind the others. kinds: what they are; None if outside of documents."""
        self.tokens += tokens
        if self.runs is not None:
            self.runs.add([OUTSIDE] * len(tokens) if kinds is None else kinds)

    def weights_of(self, number: int, newest: int) -> int:
        """The number of the weights for its document ``number``, from 0, when it is put on pages.

        It is ``newest``, except for a document that the span had before it lost its pages.
        """
        kept = self.document_weights
        return kept[number] if number < len(kept) else newest

    def chunk_end(self, end: int) -> int:
        """The place up to which a prefill that begins at ``cached`` may go, at most ``end``.

        It is ``cached`` itself where a document comes next, which is prefilled on its own. A row
        stops before its last token, which goes through the decoder. The tokens of a group's prompt
        lack that one already, so all of them are written: both are the prompt's length less 1.
        """
        end = min(end, max(len(self.tokens) - 1, self.prompt - 1))
        if self.runs is None:
            return end
        run = self.runs.at(self.cached)
        return min(end, run.end) if run.number == OUTSIDE else self.cached

    def is_result(self, longest: int) -> bool:
        """True if the prompt is in the cache and what comes next is at most ``longest`` tokens."""
        last = self.chunk_end(len(self.tokens))
        return self.cached >= self.prompt - 1 and last - self.cached <= longest

    def advance(self) -> None:
        """Counts documents that come next and are written as cached, and padding behind them."""
        while self.runs is not None:
            run = self.runs.at(self.cached)
            # a document may not have been put on its pages yet
            there = self.documents[run.number - 1 : run.number] if run.number > 0 else ()
            whole = self.cached == run.end or any(document.written for document in there)
            place = self.runs.behind(run)
            if not whole or place == self.cached:
                return
            self.cached = place


@dataclasses.dataclass(eq=False)
class Document(Span):
    """A document that spans have on their pages, each of them on the same ones.

    ``weights`` is the number of the weights that compute all its keys. ``prompt`` is one more than
    its tokens, because all of them are prefilled.
    """

    # Spans that hold it.
    holders: int = 0

    @property
    def written(self) -> bool:
        """True if all its keys are in the cache."""
        return self.cached == len(self.tokens)

    def is_result(self, longest: int) -> bool:
        """True if it is short enough for the shape of results, wherever it stands.

        That depends on all its tokens, not on what is missing, so that its keys are always the
        same.
        """
        return len(self.tokens) <= longest

    @property
    def key(self) -> bytes:
        """Its fingerprint: what its keys depend on, and its owner."""
        return fingerprint(self.tokens, self.salt)

    def names(self, page: int) -> list[bytes]:
        """The names of its pages, for ``PageAllocator.name``."""
        return page_names(self.key, len(self.tokens), page)


def fingerprint(tokens: Sequence[int], salt: bytes) -> bytes:
    """The hash of a document's tokens and of all else that its keys depend on (``Span.salt``)."""
    content = b"document %d %s " % (len(salt), salt) + np.asarray(tokens, np.int64).tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


def page_names(key: bytes, length: int, page: int) -> list[bytes]:
    """The names of the pages of a document of ``length`` tokens with this fingerprint."""
    return [key + b"%d" % number for number in range(-(-length // page))]
