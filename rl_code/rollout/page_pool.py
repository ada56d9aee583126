"""The pages of an engine's cache, and who holds them.

A span of tokens holds pages. Spans share the pages of a common prefix; a page is copied before a
span that shares it writes to it. What is on the pages of a span can be saved to host memory
(pre-emption), or handed over to the cache of another engine.

Only the tokens of prompts can be found in the cache, never sampled ones. A key that decoding wrote
may differ in its last bit from the key that a prefill would write, and the numbers of a row must
not depend on what it finds in the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from attention.cache.paged import PagedCache, page_bytes
from attention.cache.pages import OutOfPages, PageAllocator
from attention.cache.storage import to_host
from models.sharding import parameter_shardings
from models.transformer import Transformer
from rl_code.rollout.engine import DecodeInput, Engine


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
    # What the pages held when the span lost them: one array [pages, ...] for each array of the
    # cache. None if nothing was saved.
    saved: list | None = None
    # Number of the weights with which the span's first keys were computed.
    weights: int = 0

    @property
    def held(self) -> bool:
        """Whether it has pages."""
        return self.sequence is not None

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - self.cached


class PagePool:
    """An engine's cache and the pages of each of its shards."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._config = engine.config
        self._page_bytes = page_bytes(engine.cache_shape())
        self._weights = 0
        self.clear()

    def clear(self) -> None:
        """Forgets everything; the cache is allocated when it is next needed."""
        self._arrays: PagedCache | None = None
        self._shards = [
            PageAllocator(self._config.pages, self._config.page) for _ in range(self.engine.shards)
        ]
        # The spans whose prompts are not prefilled to their end, oldest first.
        self._filling: dict[Span, None] = {}
        # Pages (source, target) of each shard that must be copied before anything is written.
        self._copies: list[list[tuple[int, int]]] = [[] for _ in self._shards]
        self._peak = 0

    def new_weights(self) -> None:
        """From now on prompts are shared with those of the same weights only."""
        self._weights += 1

    def place(self, model: Transformer) -> Transformer:
        """A model on this engine's devices."""
        with jax.set_mesh(self.engine.mesh):
            return jax.device_put(model, parameter_shardings(model, self.engine.mesh))

    def take_peak_bytes(self) -> int:
        """Bytes of the most pages that were in use at once since the last call; from any thread."""
        peak, self._peak = self._peak, self._used()
        return peak * self._page_bytes

    def pages(self, span: Span) -> list[int]:
        """The pages of a span, in order."""
        return self._shards[span.shard].pages(span.sequence)

    def shared_pages(self, row: Span) -> int:
        """How many of a row's first pages all rows of its group share."""
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
        self.reserve(row, row.cached + 1)

    def reserve(self, span: Span, length: int) -> None:
        """Gives a span that holds pages as many as ``length`` tokens need. Raises OutOfPages."""
        allocator = self._shards[span.shard]
        more = max(0, length - allocator.length(span.sequence))
        self._copies[span.shard] += allocator.reserve(span.sequence, more)
        self._note_use()

    def release(self, span: Span) -> None:
        """Lets go of a span's pages, if it holds any."""
        if span.held:
            # A copy that is still due may read or write these pages, which another span may get
            # next. So it is made first.
            self._make_copies()
            # The values of ``_filling`` are None, so None means that the span was in it: its prompt
            # is not written to its end, and the allocator must forget the pages that lack tokens.
            unfinished = self._filling.pop(span, self) is None
            self._shards[span.shard].release(span.sequence, span.cached if unfinished else None)
        span.sequence = None

    def save(self, span: Span, *, on_device: bool) -> None:
        """Lets go of a span's pages and keeps what they hold, on the devices or in host memory."""
        pages = self.pages(span)
        width = self._config.table
        # The program has one shape and reads ``width`` pages of every shard. On other shards, and
        # behind the span's own pages, it reads page 0, which nobody uses.
        content = self.engine.read_pages(self._cache(), self._padded(span.shard, pages, fill=0))
        part = slice(span.shard * width, (span.shard + 1) * width)
        if on_device:
            span.saved = [x[part] for x in content]
        else:
            span.saved = [np.asarray(x)[part][: len(pages)] for x in to_host(content)]
        self.release(span)

    def forget(self, span: Span) -> None:
        """Lets go of a span's pages and of what was saved; its keys must be computed anew."""
        self.release(span)
        span.saved, span.cached = None, 0

    def restore(self, span: Span) -> None:
        """Gives pages to a span that lost them, and puts back what was saved. There must be pages
        for one more dispatch, too. Raises OutOfPages.
        """
        cached = span.cached  # ``_open`` sets it to what it finds in the cache
        length = len(span.tokens) + self._config.decode_steps
        # Keys that were saved are still those of the old weights. Others are computed with the
        # weights of now.
        if span.saved is None:
            span.weights = self._weights
        # Only the prompt may be looked for in the cache (see the top of this file).
        self._open(span, span.tokens[: span.prompt - 1], length + self._config.page)
        self.reserve(span, len(span.tokens))
        if span.saved is not None:
            self._put(span)
            span.cached, span.saved = cached, None
            self._filling.pop(span, None)

    def _open(self, span: Span, tokens: list[int], length: int) -> None:
        """Gives a span pages for prompt tokens, on the shard with the most free pages, and takes
        those that the cache has already. Raises OutOfPages unless ``length`` tokens would fit.
        """
        shard = max(range(len(self._shards)), key=lambda shard: self._shards[shard].free)
        allocator = self._shards[shard]
        page = self._config.page
        needed = min(-(-length // page), self._config.table + 1)
        if needed > allocator.free:
            raise OutOfPages(needed, allocator.free)
        span.sequence, cached = allocator.start(tokens, b"%d" % span.weights)
        span.shard = shard
        # The allocator knows a page by its tokens as soon as a span has reserved it. The prefill
        # that writes the page may still be to come, so only pages before the first such page count
        # as cached.
        unwritten = {
            found
            for other in self._filling
            if other.shard == shard
            for found in self.pages(other)[other.cached // page :]
        }
        shared = self.pages(span)[: cached // page]
        written = next((at for at, found in enumerate(shared) if found in unwritten), len(shared))
        span.cached = written * page
        if span.cached < len(tokens):
            self._filling[span] = None
        self._note_use()

    def _put(self, span: Span) -> None:
        """Writes what was saved onto the pages of a span that were not found in the cache."""
        found = span.cached // self._config.page
        width = self._config.table

        def whole(x):
            return (
                x if len(x) == width else np.pad(x, [(0, width - len(x))] + [(0, 0)] * (x.ndim - 1))
            )

        # A page number past the end is not written: the first ``found`` pages are right already,
        # and other spans may hold them too.
        pages = [self._config.pages] * found + self.pages(span)[found : len(span.saved[0])]
        padded = self._padded(span.shard, pages, fill=self._config.pages)
        self._arrays = self.engine.write_pages(
            self._cache(), padded, [whole(x) for x in span.saved]
        )

    def _padded(self, shard: int, pages: list[int], fill: int) -> np.ndarray:
        """int32 [shards * table]: the pages of one shard, and ``fill`` everywhere else."""
        padded = np.full((self.engine.shards, self._config.table), fill, np.int32)
        padded[shard, : len(pages)] = pages
        return padded.reshape(-1)

    def _note_use(self) -> None:
        self._peak = max(self._peak, self._used())

    def _used(self) -> int:
        """Pages in use."""
        return sum(allocator.num_pages - allocator.free for allocator in self._shards)

    # --- Programs ---------------------------------------------------------------------------------

    def prefill(self, model: Transformer, spans: Sequence[Span]) -> int:
        """Prefills a chunk of the first spans of every shard, and returns the number of tokens.

        The last token of a row is left out: it goes through the decoder. Short answers of tools
        have a dispatch of their own. Which of the two a span is in depends on its own tokens alone,
        so that its numbers do not depend on other spans. The spans must hold pages for their
        tokens.
        """
        c = self._config
        answers = [span for span in spans if self._is_answer(span)]
        others = [span for span in spans if not self._is_answer(span)]
        total = self._prefill(model, others, c.prefill_rows, c.prefill_tokens) if others else 0
        return total + (
            self._prefill(model, answers, c.answer_rows, c.answer_tokens) if answers else 0
        )

    def _is_answer(self, span: Span) -> bool:
        """Whether the prompt is in the cache and what is missing is short enough."""
        return span.cached >= span.prompt - 1 and span.missing - 1 <= self._config.answer_tokens

    def _prefill(self, model: Transformer, spans: Sequence[Span], rows: int, length: int) -> int:
        """One dispatch of shape [rows, length] per shard; returns the number of tokens."""
        c = self._config
        used = [0] * self.engine.shards  # rows of each shard that are taken
        total = 0
        shape = (self.engine.shards, rows)
        tables = np.full((*shape, c.table), -1, np.int32)
        tokens = np.zeros((*shape, length), np.int32)
        places = np.full((*shape, length), -1, np.int32)
        for span in spans:
            at = (span.shard, used[span.shard])
            if at[1] == rows:
                continue
            used[span.shard] += 1
            start = span.cached
            # A row stops before its last token. The tokens of a group's prompt lack the last one
            # already, so all of them are written: both are the prompt's length less 1.
            last = max(len(span.tokens) - 1, span.prompt - 1)
            end = min(start + length, last)
            pages = self.pages(span)
            tables[(*at, slice(0, len(pages)))] = pages
            tokens[(*at, slice(0, end - start))] = span.tokens[start:end]
            places[(*at, slice(0, end - start))] = np.arange(start, end)
            span.cached = end
            total += end - start
            if end >= span.prompt - 1:
                self._filling.pop(span, None)
        if total:
            flat = (x.reshape(-1, x.shape[-1]) for x in (tables, tokens, places))
            self._arrays = self.engine.prefill(model, self._cache(), *flat)
        return total

    def wait(self) -> None:
        """Waits until the devices have done what was dispatched."""
        jax.block_until_ready(self._arrays)

    def decode(self, model: Transformer, inputs: DecodeInput) -> tuple[np.ndarray, ...]:
        """One dispatch of the decoder: (tokens, logprobs, counts) as the engine returns them, on
        the host.
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
