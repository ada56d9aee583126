"""The page allocator against a cache that is written as it says: every sequence always reads its
own tokens.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attention.cache.pages import OutOfPages, PageAllocator

PAGES, SIZE = 12, 4
TOKENS = st.lists(st.integers(0, 1), max_size=14)


class Cache(RuleBasedStateMachine):
    """Each place of the cache holds the token there and all that came before it, as keys do."""

    def __init__(self):
        super().__init__()
        self.pages = PageAllocator(PAGES, SIZE)
        self.memory = {page: [None] * SIZE for page in range(PAGES)}
        self.sequences: dict[int, tuple] = {}
        self.taken: list[int] = []

    def write(self, sequence: int, tokens: tuple, start: int) -> None:
        table = self.pages.tables([sequence], PAGES)[0]
        for at in range(start, len(tokens)):
            self.memory[int(table[at // SIZE])][at % SIZE] = tokens[: at + 1]
        self.sequences[sequence] = tokens

    @rule(tokens=TOKENS, salt=st.integers(0, 1))
    def start(self, tokens, salt):
        tokens = [salt + 10, *tokens]  # the salt stands in the memory as well
        free = self.pages.free
        try:
            sequence, cached = self.pages.start(tokens, bytes([salt]))
        except OutOfPages as error:
            assert error.needed > error.free and self.pages.free == free
            return
        assert cached % SIZE == 0 and cached < len(tokens)
        self.write(sequence, tuple(tokens), cached)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=TOKENS)
    def append(self, data, tokens):
        sequence = data.draw(st.sampled_from(sorted(self.sequences)))
        before = self.sequences[sequence]
        try:
            copies = self.pages.append(sequence, tokens)
        except OutOfPages:
            return
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        self.write(sequence, before + tuple(tokens), len(before))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(0, 9), tokens=TOKENS)
    def reserve(self, data, count, tokens):
        sequence = data.draw(st.sampled_from(sorted(self.sequences)))
        before = self.sequences[sequence]
        free = self.pages.free
        try:
            copies = self.pages.reserve(sequence, count)
        except OutOfPages:
            assert self.pages.free == free
            return
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        after = before + tuple(tokens[:count])
        self.write(sequence, after, len(before))
        assert self.pages.append(sequence, tokens[:count]) == []

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.sequences)))
        self.sequences[self.pages.fork(sequence)] = self.sequences[sequence]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.sequences)))
        self.pages.release(sequence)
        del self.sequences[sequence]
        with pytest.raises(ValueError, match=f"sequence={sequence} is not held"):
            self.pages.release(sequence)

    @rule(count=st.integers(0, 4))
    def take(self, count):
        if count <= self.pages.free:
            pages = self.pages.take(count)
            for page in pages:
                self.memory[page] = ["taken"] * SIZE
            self.taken += pages

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def drop(self, data):
        page = data.draw(st.sampled_from(self.taken))
        self.pages.drop([page])
        self.taken.remove(page)

    @invariant()
    def every_sequence_reads_its_tokens(self):
        self.pages.check()
        for sequence, tokens in self.sequences.items():
            table = self.pages.tables([sequence], PAGES)[0]
            assert self.pages.length(sequence) == len(tokens)
            for at in range(len(tokens)):
                assert self.memory[int(table[at // SIZE])][at % SIZE] == tokens[: at + 1]


Cache.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCache = Cache.TestCase


def test_a_common_prefix_is_shared_even_after_its_release():
    pages = PageAllocator(8, 4)
    first, cached = pages.start(range(10))
    assert cached == 0 and pages.free == 5
    second, cached = pages.start([*range(9), 77])
    assert cached == 8 and pages.free == 4
    pages.release(first)
    pages.release(second)
    assert pages.free == 8
    _, cached = pages.start(range(8))
    assert cached == 4  # the last token's logits are wanted, so its page is computed


def test_only_the_writer_of_a_shared_half_page_copies_it():
    pages = PageAllocator(8, 4)
    first, _ = pages.start(range(6))
    second = pages.fork(first)
    ((source, target),) = pages.append(first, [6])
    assert source == pages.tables([second], 2)[0, 1] and target == pages.tables([first], 2)[0, 1]
    assert pages.append(second, [7]) == []


def test_errors_name_the_values():
    pages = PageAllocator(2, 4)
    with pytest.raises(OutOfPages, match="needed=3 pages, free=2"):
        pages.start(range(9))
    sequence, _ = pages.start(range(8))
    with pytest.raises(OutOfPages, match="needed=1 pages, free=0"):
        pages.append(sequence, [1])
    with pytest.raises(OutOfPages, match="needed=1 pages, free=0"):
        pages.take(1)
    with pytest.raises(ValueError, match="sequence=0 has 2 pages, more than width=1"):
        pages.tables([sequence], 1)
    with pytest.raises(ValueError, match="page=1 is taken 0 times, not 1"):
        pages.drop([1])
    with pytest.raises(ValueError, match="num_pages=0"):
        PageAllocator(0, 4)


def test_a_start_that_fails_changes_nothing():
    pages = PageAllocator(3, 4)
    pages.release(pages.start(range(8))[0])
    pages.take(1)
    with pytest.raises(OutOfPages, match="needed=1 pages, free=0"):
        pages.start(range(12))  # the two free pages hold its prefix
    assert pages.free == 2
    pages.check()


def test_pages_of_documents_are_shared_and_the_first_let_go_of_is_used_first():
    pool = PageAllocator(7, 4)
    names = {document: [b"%d %d" % (document, page) for page in range(2)] for document in range(3)}
    documents = {}
    for document, own in names.items():
        documents[document], _ = pool.start([])
        pool.reserve(documents[document], 8)
        assert pool.find(own) is None
        pool.name(documents[document], own)
        assert pool.find(own) == pool.pages(documents[document])
    pool.attach(reader := pool.start([])[0], 0, pool.pages(documents[1]))
    # not in the order of their numbers
    for document in (2, 0, 1):
        pool.release(documents[document])
    assert pool.free == 5  # the reader still has those of 1
    assert all(pool.find(own) for own in names.values())
    pool.take(2)  # the free page, and one of the document that was let go of first
    assert pool.find(names[2]) is None and pool.find(names[0]) and pool.find(names[1])
    pool.release(reader)
    pool.check()


def test_attached_pages_replace_reserved_ones_and_hide_nothing_behind_them():
    pool = PageAllocator(8, 4)
    document, _ = pool.start([])
    pool.attach(document, 0, fresh := pool.take(1))
    pool.drop(fresh)
    row, cached = pool.start([1, 2, 3])
    pool.reserve(row, 9)  # as a decoding loop does, past the place of the document
    pool.attach(row, 1, fresh)
    assert pool.pages(row)[1:] == fresh and pool.free == 6
    pool.reserve(row, 9)
    assert len(pool.pages(row)) == 3 and cached == 0
    pool.check()
    with pytest.raises(ValueError, match="has 3 pages, fewer than at=5"):
        pool.attach(row, 5, fresh)
    pool.release(row)
    assert pool.held(fresh[0])
    pool.release(document)
    assert pool.free == 8
    pool.check()


def test_a_prefix_with_given_pages_is_found_only_with_the_same_pages_between():
    pool = PageAllocator(12, 2)
    document, _ = pool.start([])
    pool.attach(document, 0, given := pool.take(1))
    pool.drop(given)
    tokens = [1, 2, -9, -1, 3, 4, 5]
    first, cached = pool.start(tokens, given={1: given[0]})
    assert cached == 0 and pool.pages(first)[1] == given[0]
    second, cached = pool.start(tokens, given={1: given[0]})
    assert cached == 6 and pool.pages(second)[:3] == pool.pages(first)[:3]
    _, cached = pool.start([1, 2, -8, -1, 3, 4, 5], given={1: given[0]})
    assert cached == 4  # what follows another document is not found
    pool.check()
