"""The pages of an engine's cache, and who holds them.

A span of tokens holds pages. Spans share the pages of a common prefix; a page is copied before a
span that shares it writes to it. What is on the pages of a span can be saved to host memory
(pre-emption), or handed over to the cache of another engine.

Documents are prefilled on their own, and spans have their pages among their own
(``document_pool``).

Only the tokens of prompts can be found in the cache, never sampled ones. A key that decoding wrote
may differ in its last bit from the key that a prefill would write, and the numbers of a row must
not depend on what it finds in the cache.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from attention.cache.paged import PagedCache, page_bytes
from attention.cache.pages import OutOfPages, PageAllocator
from models.adapter_rows import num_adapters
from models.sharding import parameter_shardings
from models.transformer import Transformer
from models.unstacked import Unstacked
from rl_code.rollout.decode_input import DecodeInput
from rl_code.rollout.disk_pages import DiskPages, DocumentFiles
from rl_code.rollout.document_pool import DocumentPool
from rl_code.rollout.engine import Engine
from rl_code.rollout.host_pages import HostPages, to_host, together
from rl_code.rollout.prefill_input import prefill_input
from rl_code.rollout.prefill_wire import block_sizes
from rl_code.rollout.spans import ContextRuns, Document, Run, Span
from rl_code.rollout.stats import RolloutStats


class PagePool:
    """An engine's cache and the pages of each of its shards."""

    def __init__(self, engine: Engine, disk: DiskPages | None = None):
        """disk: keeps the keys of documents in files; None for none."""
        self.engine = engine
        self._files = None if disk is None else DocumentFiles(disk, engine)
        self._config = engine.config
        self._page_bytes = page_bytes(engine.cache_shape())
        self._weights = 0
        budget = self._config.host_pages_mb
        self._host = None if budget is None else HostPages(budget * 2**20)
        self.clear()

    def clear(self) -> None:
        """Forgets everything; the cache is allocated when it is next needed."""
        self._arrays: PagedCache | None = None
        self._shards = [
            PageAllocator(self._config.pages, self._config.page) for _ in range(self.engine.shards)
        ]
        self._documents = [
            DocumentPool(shard, allocator) for shard, allocator in enumerate(self._shards)
        ]
        # The spans whose prompts are not prefilled to their end, oldest first.
        self._filling: dict[Span, None] = {}
        # Pages (source, target) of each shard that must be copied before anything is written.
        self._copies: list[list[tuple[int, int]]] = [[] for _ in self._shards]
        if self._host is not None:
            self._host.clear()
            for allocator in self._shards:
                allocator.dropped = []
        self._peak = 0
        # Pages to the host and from there since the counts were last taken, and the most bytes
        # there.
        self._host_counts = (0, 0, 0)
        # Documents that were put on contexts since the counts were last taken, those of them that
        # were found, and the tokens of these.
        self._counts = (0, 0, 0)

    def runs(self) -> ContextRuns | None:
        """The runs of a context without tokens; None in a run without documents."""
        return None if self._config.longest_document is None else ContextRuns(self._config)

    def new_weights(self) -> None:
        """From now on prompts and documents are shared with those of the same weights only."""
        self._weights += 1
        if self._host is not None:
            self._host.clear()

    def identify(self, model: Transformer) -> None:
        """Tells which weights are those of now, where keys are kept in files."""
        if self._files is not None:
            self._files.identify(model, self._weights)

    def place(self, model: Transformer) -> Transformer:
        """A model on this engine's devices. Each shard of rows has the whole weights."""
        mesh = self.engine.mesh
        with jax.set_mesh(mesh):
            return jax.device_put(model, parameter_shardings(model, mesh, whole=True))

    def add_stats(self, stats: RolloutStats) -> RolloutStats:
        """The counts with those of this pool since the last call; from any thread."""
        peak, self._peak = self._peak, self._used()
        asked, found, tokens = self._counts
        self._counts = (0, 0, 0)
        sent, back, most = self._host_counts
        self._host_counts = (0, 0, 0)
        return dataclasses.replace(
            stats,
            kv_bytes=stats.kv_bytes + peak * self._page_bytes,
            pages_to_host=stats.pages_to_host + sent,
            pages_from_host=stats.pages_from_host + back,
            host_tokens=stats.host_tokens + back * self._config.page,
            host_bytes=stats.host_bytes + most,
            documents=stats.documents + asked,
            documents_found=stats.documents_found + found,
            document_tokens_found=stats.document_tokens_found + tokens,
        )

    def pages(self, span: Span) -> list[int]:
        """The pages of a span, in order."""
        return self._shards[span.shard].pages(span.sequence)

    def shared_pages(self, row: Span) -> int:
        """Number of a row's first pages that all rows of its group share."""
        # Each row feeds the last token of the prompt to the decoder itself. The page that this
        # token falls on is therefore the row's own, and full pages before it are shared.
        return (row.prompt - 1) // self._config.page

    # --- Taking pages and letting go --------------------------------------------------------------

    def open(self, prompt: Span) -> None:
        """Gives a prompt pages, on the shard with the most free ones. One more page must be free
        there, for the first row of the group. Raises OutOfPages.
        """
        prompt.weights = self._weights
        self._open(prompt, prompt.tokens, len(prompt.tokens) + self._config.page)

    def fork(self, prompt: Span, row: Span) -> None:
        """Gives a row the pages of a prompt, and a copy of the last one. Raises OutOfPages."""
        allocator = self._shards[prompt.shard]
        # The row writes behind the prompt, so it needs a page of its own at once. This is checked
        # before the fork, which would otherwise have to be undone.
        if not allocator.free:
            raise OutOfPages(1, 0)
        row.shard = prompt.shard
        row.cached = prompt.cached
        row.sequence = allocator.fork(prompt.sequence)
        row.weights = prompt.weights
        row.documents = list(prompt.documents)
        self._documents[row.shard].share(row.documents)
        self.reserve(row, row.cached + 1)

    def reserve(self, span: Span, length: int) -> None:
        """Gives a span that holds pages as many as ``length`` tokens need. Raises OutOfPages."""
        if span.runs is not None:
            for run in span.runs.documents(length)[len(span.documents) :]:
                self._reserve(span, run.start)
                document = self._hold(span, run)
                at = run.start // self._config.page
                self._shards[span.shard].attach(span.sequence, at, self.pages(document))
        self._reserve(span, length)
        self._note_use()

    def _reserve(self, span: Span, length: int) -> None:
        allocator = self._shards[span.shard]
        more = max(0, length - allocator.length(span.sequence))
        self._copies[span.shard] += allocator.reserve(span.sequence, more)

    def _hold(self, span: Span, run: Run) -> Document:
        """Has a span hold its next document. Raises OutOfPages."""
        number = len(span.documents)
        weights = span.weights_of(number, self._weights)
        documents = self._documents[span.shard]
        document, found = documents.hold(span, run, weights)
        span.documents.append(document)
        if self._host is not None and not found:
            pages = self.pages(document)
            content = self._host.find(document.names(self._config.page))
            if len(content) == len(pages):
                self._bring(span.shard, pages, content)
                documents.finish(document)
                found = True
        if self._files is not None and not found and not document.written:
            content = self._files.find(document, len(self.pages(document)))
            if content is not None:
                self._bring(span.shard, self.pages(document), content)
                documents.finish(document)
                found = True
        if number >= len(span.document_weights):  # not one that the span had before
            asked, there, tokens = self._counts
            # exchanged as a whole, since another thread may ask
            self._counts = (asked + 1, there + found, tokens + found * run.length)
        return document

    def release(self, span: Span) -> None:
        """Lets go of a span's pages, if it holds any."""
        if span.held:
            span.advance()
            # A copy that is still due may read or write these pages, which another span may get
            # next. So it is made first.
            self._make_copies()
            # The values of ``_filling`` are None, so None means that the span was in it: its prompt
            # is not written to its end, and the allocator must forget the pages that lack tokens.
            unfinished = self._filling.pop(span, self) is None
            self._shards[span.shard].release(span.sequence, span.cached if unfinished else None)
            span.document_weights = [each.weights for each in span.documents[: span.seen]]
            self._documents[span.shard].let_go(span.documents)
            span.documents = []
        span.sequence = None

    def drop_ahead(self, span: Span) -> None:
        """Lets go of the documents that come behind what a span has in the cache.

        ``reserve`` puts them there again, then as the weights of now compute them. So all that
        stands behind a place of a context is computed by these weights or newer ones.
        """
        if span.held:
            span.advance()
            self._documents[span.shard].let_go(span.documents[span.seen :])
            del span.documents[span.seen :]

    def save(self, span: Span, *, on_device: bool) -> None:
        """Lets go of a span's pages and keeps what they hold, on the devices or in host memory."""
        pages = self.pages(span)
        width = self._config.table
        # The program has one shape and reads ``width`` pages of every shard. On other shards, and
        # behind the span's own pages, it reads page 0, which nobody uses.
        content = self.engine.read_pages(self._cache(), self._padded(span.shard, pages, fill=0))
        part = slice(span.shard * width, (span.shard + 1) * width)
        if on_device:
            span.saved = [[x[part] for x in content]]
        else:
            span.saved = [[np.asarray(x)[part][: len(pages)] for x in to_host(content)]]
        self.release(span)

    def read(self, span: Span) -> Iterator[list[jax.Array]]:
        """Content of the pages of a span, in blocks of ``block_sizes`` pages, for another process.

        A block has an array [shards * pages of it, ...] for each array of the cache; the part of
        the span's own shard counts.
        """
        pages = self.pages(span)[: -(-len(span.tokens) // self._config.page)]
        at = 0
        for size in block_sizes(len(pages)):
            block = self._padded(span.shard, pages[at : at + size], fill=0, width=size)
            yield self.engine.read_pages(self._cache(), block)
            at += size

    def receive(self, span: Span, blocks: list[list[jax.Array]]) -> None:
        """Has ``restore`` put on pages what another process has computed of all tokens of a span,
        with the weights of now.

        blocks: what ``read`` gave there, of the span's own shard.
        """
        span.saved, span.cached = blocks, len(span.tokens)
        span.weights = self._weights

    def forget(self, span: Span) -> None:
        """Lets go of a span's pages and of what was saved; its keys must be computed anew."""
        self.release(span)
        span.saved, span.cached = None, 0
        span.document_weights = []

    def restore(self, span: Span) -> None:
        """Gives pages to a span that lost them, and puts back what was saved. There must be pages
        for one more dispatch, too. Raises OutOfPages.
        """
        cached = span.cached  # ``_open`` sets it to what it finds in the cache
        length = len(span.tokens) + self._config.dispatch_tokens
        # Keys that were saved are still those of the old weights. Others are computed with the
        # weights of now.
        if span.saved is None:
            span.weights = self._weights
        # Only the prompt may be looked for in the cache (see the top of this file).
        self._open(span, span.tokens[: span.prompt - 1], length + self._config.page)
        self.reserve(span, len(span.tokens))
        if span.saved is not None:
            self._put(span, cached)
            span.cached, span.saved = cached, None
            if cached >= span.prompt - 1:
                self._filling.pop(span, None)

    def _open(self, span: Span, tokens: list[int], length: int) -> None:
        """Gives a span pages for prompt tokens, on the shard with the most free pages, and takes
        those that the cache has already. Raises OutOfPages unless ``length`` tokens would fit.
        """
        page = self._config.page
        shard, found = self._choose_shard(span, length)
        allocator = self._shards[shard]
        # Those that nobody holds are free now, but not once this span holds them.
        held = sum(allocator.held(number) for number in found)
        needed = min(-(-length // page), self._config.table + 1) - held
        if needed > allocator.free:
            raise OutOfPages(needed, allocator.free)
        span.shard = shard
        given = {}
        if span.runs is not None:
            for run in span.runs.documents(len(tokens)):
                pages = self.pages(self._hold(span, run))
                given |= dict(enumerate(pages, start=run.start // page))
            numbers = span.runs.numbered(tokens)
        else:
            numbers = tokens
        span.sequence, cached = allocator.start(numbers, span.salt, given)
        # The allocator knows a page by its tokens as soon as a span has reserved it. The prefill
        # that writes the page may still be to come, so only pages before the first such page count
        # as cached.
        unwritten = self._unwritten(shard)
        shared = self.pages(span)[: cached // page]
        written = next((at for at, found in enumerate(shared) if found in unwritten), len(shared))
        # what was saved of a span is put back in any case
        if self._host is not None and span.saved is None and written == len(shared):
            written += self._from_host(span, written, len(tokens), unwritten)
        span.cached = written * page
        span.advance()
        if span.cached < len(tokens):
            self._filling[span] = None
        self._note_use()

    def _from_host(self, span: Span, first: int, length: int, unwritten: set[int]) -> int:
        """Puts pages that are on the host onto those of a span from its page ``first`` on; returns
        how many pages are written then, those of documents among them. As in
        ``PageAllocator.start`` the last of its ``length`` tokens is on none of them.
        """
        names = self._shards[span.shard].names(span.sequence)
        pages = self.pages(span)
        given = set().union(*map(self.pages, span.documents))
        moved = []
        content = []
        end = first
        for at in range(first, max(0, length - 1) // self._config.page):
            found = [] if pages[at] in given else self._host.find([names[at]])
            if not found and (pages[at] not in given or pages[at] in unwritten):
                break
            moved += [pages[at]] * len(found)
            content += found
            end = at + 1
        self._bring(span.shard, moved, content)
        return end - first

    def _to_files(self, document: Document) -> None:
        """Has the keys of a document, which are all written, kept in a file."""
        pages, at, blocks = self.pages(document), 0, []
        for size in block_sizes(len(pages)):
            block = self._padded(document.shard, pages[at : at + size], fill=0, width=size)
            content = self.engine.read_pages(self._cache(), block)
            part = slice(document.shard * size, (document.shard + 1) * size)
            blocks.append([x[part] for x in content])
            at += size
        self._files.keep(document, blocks)

    def _bring(self, shard: int, pages: list[int], content: list[Any]) -> None:
        """Writes pages from the host onto pages of a shard."""
        at = 0
        for size in block_sizes(len(pages)):
            block = slice(at, at + size)
            self._write(shard, pages[block], together(content[block]))
            at += size
        sent, back, most = self._host_counts
        self._host_counts = (sent, back + len(pages), most)

    def _to_host(self) -> None:
        """Copies pages that could be found, and will be written to, to the host."""
        for shard, allocator in enumerate(self._shards):
            dropped, allocator.dropped = allocator.dropped, []
            # two shards may drop the same page, and one may have come from the host
            dropped = [pair for pair in dropped if self._host.lacks(pair[1])]
            at = 0
            for size in block_sizes(len(dropped)):
                pages, names = zip(*dropped[at : at + size], strict=True)
                at += size
                padded = self._padded(shard, list(pages), fill=0, width=size)
                content = self.engine.read_pages(self._arrays, padded)
                self._host.keep(names, [x[shard * size : (shard + 1) * size] for x in content])
            sent, back, most = self._host_counts
            self._host_counts = (sent + len(dropped), back, max(most, self._host.bytes))

    def _choose_shard(self, span: Span, length: int) -> tuple[int, list[int]]:
        """(the shard with the most room for a span, the pages of its documents that are there).

        length: places that it needs pages for.
        """
        found = [documents.find_all(span, length, self._weights) for documents in self._documents]

        def room(shard: int) -> int:
            return self._shards[shard].free + len(found[shard])

        shard = max(range(len(self._shards)), key=room)
        return shard, found[shard]

    def _unwritten(self, shard: int) -> set[int]:
        """The pages of a shard that can be found, or are held, before they are written."""
        unwritten = set()
        for span in self._filling:
            if span.shard == shard:
                # whether those of its documents are written does not depend on this span
                own = set(self.pages(span)[span.cached // self._config.page :])
                unwritten |= own.difference(*map(self.pages, span.documents))
        return unwritten.union(*map(self.pages, self._documents[shard].unwritten))

    def _put(self, span: Span, cached: int) -> None:
        """Writes what was saved onto the pages of a span that were not found in the cache.

        cached: how many tokens had their keys on the pages when they were saved.
        """
        found = span.cached // self._config.page
        # A page number past the end is not written: the first ``found`` pages are right already,
        # and other spans may hold them too.
        skipped = self._config.pages
        count = sum(len(block[0]) for block in span.saved)
        pages = [skipped] * found + self.pages(span)[found:count]
        restored = []
        runs = [] if span.runs is None else span.runs.documents(len(span.tokens))
        for run, document in zip(runs, span.documents, strict=True):
            # what was saved has its keys, and its pages lack them
            if run.end <= cached and not document.written:
                restored.append(document)
            else:
                first = run.start // self._config.page
                last = min(first + len(self.pages(document)), len(pages))
                pages[first:last] = [skipped] * (last - first)
        for block in span.saved:
            self._write(span.shard, pages[: len(block[0])], block)
            pages = pages[len(block[0]) :]
        for document in restored:
            self._documents[span.shard].finish(document)

    def _write(self, shard: int, pages: list[int], block: list) -> None:
        """Writes a block of saved pages onto pages of a shard; those past the end are skipped."""
        skipped = self._config.pages
        if all(page == skipped for page in pages):
            return
        width = len(block[0])
        if isinstance(block[0], np.ndarray):  # in host memory, where padding costs no program
            more = self._config.table - width
            width += more
            block = [np.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1)) for x in block]
        padded = self._padded(shard, pages, fill=skipped, width=width)
        self._arrays = self.engine.write_pages(self._cache(), padded, block)

    def _padded(
        self, shard: int, pages: list[int], fill: int, width: int | None = None
    ) -> np.ndarray:
        """int32 [shards * width]: the pages of one shard, and ``fill`` everywhere else.

        width: of a shard; None for the pages of the longest trajectory.
        """
        width = self._config.table if width is None else width
        padded = np.full((self.engine.shards, width), fill, np.int32)
        padded[shard, : len(pages)] = pages
        return padded.reshape(-1)

    def _note_use(self) -> None:
        self._peak = max(self._peak, self._used())

    def _used(self) -> int:
        """Pages in use."""
        return sum(allocator.num_pages - allocator.free for allocator in self._shards)

    # --- Programs ---------------------------------------------------------------------------------

    def prefill(self, model: Unstacked, spans: Sequence[Span]) -> int:
        """Prefills a chunk of the first spans of every shard, and returns the number of tokens.

        The last token of a row is left out: it goes through the decoder. Short results of tools
        have a dispatch of their own. Which of the two a span is in depends on its own tokens alone,
        so that its numbers do not depend on other spans. The spans must hold pages for their
        tokens.
        """
        c = self._config
        for span in spans:
            span.advance()
        # The documents that spans wait for come before them, each once.
        waited = [[each for each in span.documents if not each.written] for span in spans]
        documents = [*dict.fromkeys(itertools.chain(*waited))]
        both = zip(waited, spans, strict=True)
        found = dict.fromkeys(itertools.chain(*((*before, span) for before, span in both)))
        # a span has nothing to prefill where a document that is not written comes next
        spans = [span for span in found if span.chunk_end(len(span.tokens)) > span.cached]
        results = [span for span in spans if span.is_result(c.result_tokens)]
        others = [span for span in spans if not span.is_result(c.result_tokens)]
        total = self._prefill(model, others, c.prefill_rows, c.prefill_tokens) if others else 0
        total += self._prefill(model, results, c.result_rows, c.result_tokens) if results else 0
        for document in documents:
            if document.written:
                self._documents[document.shard].finish(document)
                if self._files is not None:
                    self._to_files(document)
        for span in found:
            span.advance()
            if span.cached >= span.prompt - 1:
                self._filling.pop(span, None)
        return total

    def _prefill(self, model: Unstacked, spans: Sequence[Span], rows: int, length: int) -> int:
        """One dispatch of shape [rows, length] per shard; returns the number of tokens."""
        several = num_adapters(model) > 0
        inputs, ends = prefill_input(self.engine, self.pages, spans, rows, length, several)
        total = sum(end - span.cached for span, end in ends.items())
        for span, end in ends.items():
            span.cached = end
        if total:
            self._arrays = self.engine.prefill(model, self._cache(), *inputs)
        return total

    def wait(self) -> None:
        """Waits until the devices have done what was dispatched."""
        jax.block_until_ready(self._arrays)

    def decode(self, model: Unstacked, inputs: DecodeInput) -> tuple[Any, ...]:
        """One dispatch of the decoder: (tokens, logprobs, counts, choices, steps, drafted) as the
        engine returns them, on the host.
        """
        self._arrays, *results = self.engine.decode(model, self._cache(), inputs)
        return jax.device_get(tuple(results))

    def _cache(self) -> PagedCache:
        """The arrays of the cache, with all copies made.

        The engine's programs donate these arrays. Whoever calls one stores the arrays that it
        returns in their place.
        """
        if self._arrays is None:
            self._arrays = self.engine.init()
        self._make_copies()
        return self._arrays

    def _make_copies(self) -> None:
        """Copies the pages that are due, in as many dispatches as it takes."""
        size = self._config.slots
        if self._host is not None:
            self._to_host()  # before anything writes to these pages
        while any(self._copies):
            sources = np.zeros((self.engine.shards, size), np.int32)
            # a page number past the end copies nothing
            targets = np.full((self.engine.shards, size), self._config.pages, np.int32)
            for shard, copies in enumerate(self._copies):
                for at, (source, target) in enumerate(copies[:size]):
                    sources[shard, at], targets[shard, at] = source, target
            self._copies = [copies[size:] for copies in self._copies]
            arrays = self.engine.init() if self._arrays is None else self._arrays
            self._arrays = self.engine.copy_pages(arrays, sources.reshape(-1), targets.reshape(-1))
