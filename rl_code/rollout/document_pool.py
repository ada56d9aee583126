"""The documents whose pages spans share, on one shard of an engine's cache.

A document is known by its fingerprint: its tokens, the numbers of the weights and of the adapter,
and its owner. Its keys depend on nothing else, so it is prefilled once, in rows of its own, and
every span of this owner that has it on its context has the same pages in its table: the episodes of
a group, other groups, and later reads of a file that did not change. When no span holds it any
more, its pages are free, but can be found by its fingerprint until they are used for something
else; those that were let go of first are used first.
"""

from __future__ import annotations

from collections.abc import Iterable

from attention.cache.pages import PageAllocator
from rl_code.rollout.spans import Document, Run, Span, page_names


class DocumentPool:
    """The documents that spans of one shard hold."""

    def __init__(self, shard: int, allocator: PageAllocator):
        self._shard = shard
        self._allocator = allocator
        self._page = allocator.page_size
        self._held: dict[bytes, Document] = {}

    def find(self, key: bytes, length: int) -> list[int] | None:
        """The pages of a document of ``length`` tokens if somebody holds it, or if they can be
        found. key: its fingerprint.
        """
        if key in self._held:
            return self._allocator.pages(self._held[key].sequence)
        return self._allocator.find(page_names(key, length, self._page))

    def find_all(self, span: Span, length: int, newest: int) -> list[int]:
        """The pages of those documents in the first ``length`` places of a span that are there.

        newest: the number of the weights of now.
        """
        found = []
        runs = [] if span.runs is None else span.runs.documents(length)
        for number, run in enumerate(runs):
            asked = _document(span, run, span.weights_of(number, newest))
            found += self.find(asked.key, run.length) or []
        return found

    def hold(self, span: Span, run: Run, weights: int) -> tuple[Document, bool]:
        """(the document of a run of a span, held once more; whether it was there). If it was not,
        it has pages, and is to be written.

        weights: number of those that compute its keys. Raises OutOfPages.
        """
        document = _document(span, run, weights)
        key = document.key
        found = self.find(key, run.length)
        if key not in self._held:
            self._give_pages(document, found)
            self._held[key] = document
        document = self._held[key]
        document.holders += 1
        return document, found is not None

    def share(self, documents: Iterable[Document]) -> None:
        """Holds documents once more."""
        for document in documents:
            document.holders += 1

    def let_go(self, documents: Iterable[Document]) -> None:
        """Holds documents once less. The pages of one that nobody holds are free."""
        for document in documents:
            document.holders -= 1
            if not document.holders:
                del self._held[document.key]
                self._allocator.release(document.sequence)

    def finish(self, document: Document) -> None:
        """All keys of a document are written: its pages can be found from now on."""
        document.cached = len(document.tokens)
        self._allocator.name(document.sequence, document.names(self._page))

    @property
    def unwritten(self) -> list[Document]:
        """The documents that lack keys, those that were asked for first coming first."""
        return [document for document in self._held.values() if not document.written]

    def _give_pages(self, document: Document, found: list[int] | None) -> None:
        """Gives a document its pages: those that were found, which are written, or new ones."""
        fresh = []
        if found is None:
            fresh = self._allocator.take(-(-len(document.tokens) // self._page))
        sequence, _ = self._allocator.start([])
        self._allocator.attach(sequence, 0, found or fresh)
        self._allocator.drop(fresh)  # the sequence holds them now
        document.cached = 0 if found is None else len(document.tokens)
        document.shard, document.sequence = self._shard, sequence


def _document(span: Span, run: Run, weights: int) -> Document:
    """The document of a run of a span, without pages."""
    tokens = span.tokens[run.start : run.end]
    return Document(
        tokens, len(tokens) + 1, weights=weights, adapter=span.adapter, owner=span.owner
    )
