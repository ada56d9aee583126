"""The table of which page holds what: the bookkeeping of a paged KV cache, on the host and without
any array of keys.

As in PagedAttention (2309.06180), a sequence owns a table of pages, each with room for a fixed
number of tokens, and pages have reference counts.

A full page is known by a hash of its tokens and of all tokens before them. A sequence that starts
with the same tokens takes that page instead of computing it again. That is possible even when
nobody holds the page any more, until it is needed for something else. A half-filled page that
several sequences hold is copied before one of them writes to it.

A page whose content does not depend on the tokens before it, as that of a document, is given to a
sequence from outside (``attach``), and known by a name that the caller chooses (``name``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np


class OutOfPages(RuntimeError):
    """More pages are needed than are free; nothing was changed."""

    def __init__(self, needed: int, free: int):
        super().__init__(f"{needed=} pages, {free=}")
        self.needed, self.free = needed, free


@dataclasses.dataclass
class _Held:
    """A sequence."""

    # Its pages in order; those that are only reserved come last.
    pages: list[int]
    # Tokens.
    length: int
    # Hash of the tokens on full pages.
    digest: bytes
    # The tokens after those, on the page that is not full.
    rest: list[int]
    # Those of its pages that were attached: it has no tokens of its own on them.
    given: set[int] = dataclasses.field(default_factory=set)


class PageAllocator:
    """Hands out ``num_pages`` pages of ``page_size`` tokens to sequences, and to callers that count
    for themselves.
    """

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"{num_pages=} and {page_size=} must be at least 1")
        self.num_pages, self.page_size = num_pages, page_size
        # Pages that nobody holds, as the keys of a dict, which keeps their order: those that were
        # let go of first are used first.
        self._free = dict.fromkeys(range(num_pages))
        # How often each page is held, and how often by ``take``.
        self._counts = [0] * num_pages
        self._taken: Counter[int] = Counter()
        # Full pages by the hash of their tokens, and the reverse. Free pages may be among them.
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # With a list here: pages that could be found and are used for something else now, with what
        # they were known by. The caller takes them from it before it writes to a page.
        self.dropped: list[tuple[int, bytes]] | None = None
        # Sequences by number, and the next number.
        self._sequences: dict[int, _Held] = {}
        self._next = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def start(
        self,
        tokens: Sequence[int],
        salt: bytes = b"",
        given: Mapping[int, int] = types.MappingProxyType({}),
    ) -> tuple[int, int]:
        """Starts a sequence with ``tokens``: (its number, how many of them are in the cache).

        salt: whatever else keys depend on, such as the version of the weights. Pages are shared
        only under equal salts. The last token never counts as cached, since its logits are wanted.
        The caller must write the tokens that are not cached before it starts or extends another
        sequence. Raises OutOfPages.

        given: pages that somebody holds and that are attached, by their number in the sequence.
        They count as cached; whether they are written is for the caller to know.
        """
        tokens = list(tokens)
        shared = []
        digest = hashlib.blake2b(salt, digest_size=16).digest()
        for at in range(0, len(tokens) - self.page_size, self.page_size):
            chained = _chain(digest, tokens[at : at + self.page_size])
            found = given.get(at // self.page_size, self._page_of.get(chained))
            if found is None:
                break
            digest = chained
            shared.append(found)
        cached = len(shared) * self.page_size
        behind = {at: page for at, page in given.items() if at >= len(shared)}
        needed = self._pages_of(len(tokens)) - len(shared) - len(behind)
        # shared pages that nobody holds are free now, but not once this sequence holds them
        free = self.free - sum(self._counts[page] == 0 for page in set(shared))
        if needed > free:
            raise OutOfPages(needed, free)
        self._hold(shared)
        number, self._next = self._next, self._next + 1
        own = {page for at, page in given.items() if at < len(shared)}
        held = self._sequences[number] = _Held(shared, cached, digest, [], own)
        for at, page in sorted(behind.items()):
            first = at * self.page_size
            self.append(number, tokens[held.length : first])
            self.attach(number, at, [page])
            held.length = first + self.page_size
            held.digest = _chain(held.digest, tokens[first : held.length])
        self.append(number, tokens[held.length :])
        return number, cached

    def attach(self, sequence: int, at: int, pages: Sequence[int]) -> None:
        """Puts pages that somebody holds behind the first ``at`` pages of a sequence.

        Pages that were reserved from there on are let go. The sequence's length stays as it is, as
        with ``reserve``; the last page before must be full or never be written to again. Raises
        ValueError if the sequence has fewer pages.
        """
        held = self._get(sequence)
        if len(held.pages) < at:
            raise ValueError(f"{sequence=} has {len(held.pages)} pages, fewer than {at=}")
        let_go = held.pages[at:]
        held.pages[at:] = pages
        held.given = (held.given | set(pages)) & set(held.pages)
        self._hold(pages)
        self._let_go(let_go)

    def name(self, sequence: int, names: Sequence[bytes]) -> None:
        """Makes all pages of a sequence findable by names, one for each, until they are used for
        something else.
        """
        for page, name in zip(self._get(sequence).pages, names, strict=True):
            self._name(page, name)

    def find(self, names: Sequence[bytes]) -> list[int] | None:
        """The pages of these names, held or free; None unless all are there."""
        pages = [self._page_of.get(name) for name in names]
        return None if None in pages else pages

    def held(self, page: int) -> bool:
        """True if somebody holds a page."""
        return self._counts[page] > 0

    def reserve(self, sequence: int, count: int) -> list[tuple[int, int]]:
        """Makes room for ``count`` tokens at the end of a sequence.

        Returns pages (source, target) that must be copied before the tokens are written. A decoding
        loop, which does not know its tokens yet, gives them to ``append`` afterwards. There must be
        no fork in between: it would share pages that the loop writes to. Raises OutOfPages.
        """
        held = self._get(sequence)
        # the page that is not full is written to, so it must not be shared
        copy = (
            bool(count and held.rest)
            and self._counts[held.pages[held.length // self.page_size]] > 1
        )
        more = max(0, self._pages_of(held.length + count) - len(held.pages))
        if more + copy > self.free:
            raise OutOfPages(more + copy, self.free)
        fresh = self._fresh(more + copy)
        copies = []
        if copy:
            source = held.pages[held.length // self.page_size]
            target = fresh.pop()
            held.pages[held.length // self.page_size] = target
            self._let_go([source])
            copies.append((source, target))
        held.pages += fresh
        return copies

    def append(self, sequence: int, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Adds tokens at the end of a sequence; its full pages can be found by them from now on.

        Makes room and returns pages to copy as ``reserve`` does. Raises OutOfPages.
        """
        held = self._get(sequence)
        tokens = list(tokens)
        copies = self.reserve(sequence, len(tokens))
        held.length += len(tokens)
        held.rest += tokens
        while len(held.rest) >= self.page_size:
            held.digest = _chain(held.digest, held.rest[: self.page_size])
            del held.rest[: self.page_size]
            self._name(
                held.pages[(held.length - len(held.rest)) // self.page_size - 1], held.digest
            )
        return copies

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens on the same pages."""
        held = self._get(sequence)
        pages = held.pages[: self._pages_of(held.length)]
        self._hold(pages)
        number, self._next = self._next, self._next + 1
        given = held.given & set(pages)
        self._sequences[number] = _Held(pages, held.length, held.digest, list(held.rest), given)
        return number

    def release(self, sequence: int, written: int | None = None) -> None:
        """Ends a sequence. Its full pages can be found by their tokens until they are used again.

        written: how many of its tokens were really written, None for all. Pages that lack some are
        not found any more.
        """
        held = self._get(sequence)
        del self._sequences[sequence]
        if written is not None:
            for page in held.pages[written // self.page_size :]:
                if page in self._digest_of and page not in held.given:
                    del self._page_of[self._digest_of.pop(page)]
        # the end of a prefix goes first: its start serves more sequences
        self._let_go(reversed(held.pages))

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._get(sequence).length

    def pages(self, sequence: int) -> list[int]:
        """The pages of a sequence, reserved ones last."""
        return list(self._get(sequence).pages)

    def names(self, sequence: int) -> list[bytes | None]:
        """The key by which the pages of a sequence can be found; None for those that cannot be."""
        return [self._digest_of.get(page) for page in self._get(sequence).pages]

    def tables(self, sequences: Sequence[int], width: int) -> np.ndarray:
        """int32 [len(sequences), width]: the pages of each, then -1."""
        table = np.full((len(sequences), width), -1, np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            pages = self._get(sequence).pages
            if len(pages) > width:
                raise ValueError(f"{sequence=} has {len(pages)} pages, more than {width=}")
            row[: len(pages)] = pages
        return table

    def take(self, count: int) -> list[int]:
        """Pages that belong to no sequence, held until ``drop``. Raises OutOfPages."""
        if count > self.free:
            raise OutOfPages(count, self.free)
        pages = self._fresh(count)
        self._taken.update(pages)
        return pages

    def drop(self, pages: Iterable[int]) -> None:
        """Lets go of taken pages, once each."""
        pages = list(pages)
        self._check_taken(pages)
        self._taken.subtract(pages)
        self._let_go(pages)

    def check(self) -> None:
        """Asserts that the bookkeeping is consistent.

        No page is lost, no count differs from the number of its holders, and no page is known by
        the tokens of another.
        """
        holders = Counter({page: count for page, count in self._taken.items() if count})
        for held in self._sequences.values():
            assert len(held.pages) >= self._pages_of(held.length), held
            assert len(held.rest) == held.length % self.page_size, held
            own = [page for page in held.pages if page not in held.given]
            assert len(set(own)) == len(own), held
            assert held.given <= set(held.pages), held
            holders.update(held.pages)
        assert [holders[page] for page in range(self.num_pages)] == self._counts
        assert set(self._free) == {page for page, count in enumerate(self._counts) if not count}
        assert {digest: page for page, digest in self._digest_of.items()} == self._page_of
        for held in self._sequences.values():
            unfilled = held.pages[held.length // self.page_size :]
            unfilled = [page for page in unfilled if page not in held.given]
            assert not self._digest_of.keys() & set(unfilled), held
            assert all(self._counts[page] == 1 for page in unfilled[bool(held.rest) :]), held

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _get(self, sequence: int) -> _Held:
        if sequence not in self._sequences:
            raise ValueError(f"{sequence=} is not held; there are {sorted(self._sequences)}")
        return self._sequences[sequence]

    def _check_taken(self, pages: list[int]) -> None:
        for page, count in Counter(pages).items():
            if self._taken[page] < count:
                raise ValueError(f"{page=} is taken {self._taken[page]} times, not {count}")

    def _fresh(self, count: int) -> list[int]:
        pages = [page for page, _ in zip(self._free, range(count), strict=False)]
        for page in pages:
            if page in self._digest_of:
                name = self._digest_of.pop(page)
                del self._page_of[name]
                if self.dropped is not None:
                    self.dropped.append((page, name))
        self._hold(pages)
        return pages

    def _hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._free.pop(page, None)
            self._counts[page] += 1

    def _let_go(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._counts[page] -= 1
            if not self._counts[page]:
                self._free[page] = None

    def _name(self, page: int, digest: bytes) -> None:
        """Makes a full page findable, unless another one holds the same tokens."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest


def _chain(digest: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(digest + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()
