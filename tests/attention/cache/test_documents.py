"""Documents put together from their caches equal the row in which they were computed together."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.cache.documents import (
    Assembly,
    DocumentKV,
    StaleDocument,
    assemble,
    document_pages,
    encode_document,
    fingerprint_weights,
    fork,
    release,
    swap,
)
from attention.cache.pages import OutOfPages, PageAllocator
from attention.methods.dense import Dense
from pallas_kernels.tokens import sequences
from tests.attention.cache.model import (
    METHODS,
    PAGE,
    WIDTH,
    cache,
    feed,
    full,
    model,
    random_tokens,
)
from tests.attention.rows import relative

PAGES = 16
DENSE = (Dense(),)
A, B, C, TAIL = (
    random_tokens(seed, length) for seed, length in ((1, 20), (2, 32), (3, 29), (4, 25))
)
keys_values = jax.jit(lambda model, tokens, where: model.keys_values(tokens, where.order, where))


@functools.cache
def weights(methods=METHODS) -> str:
    return fingerprint_weights(model(methods), repr(methods))


def encode(tokens, methods=METHODS) -> DocumentKV:
    keys_of = functools.partial(keys_values, model(methods))
    return encode_document(keys_of, methods, tokens, weights(methods), PAGE)


def tail_of(
    paged, assemblies: list[Assembly], methods=METHODS, chunk: int = 30
) -> list[np.ndarray]:
    """Hidden states of the tail after each of two assemblies."""
    starts = [assembly.tail_place for assembly in assemblies]

    def pages_of(reached):
        tails = [reach - start for reach, start in zip(reached, starts, strict=True)]
        return document_pages(assemblies, tails, WIDTH)

    return feed(model(methods), paged, pages_of, [TAIL] * 2, starts, chunk)[0]


def assembled(documents, methods=METHODS, **options):
    """(cache, allocator, assembly) of the documents with room for the tail."""
    allocator = PageAllocator(PAGES, PAGE)
    paged, first = assemble(
        cache(PAGES, False, methods), allocator, documents, tail_pages=2, **options
    )
    return paged, allocator, first


@pytest.mark.long
@pytest.mark.parametrize("positions", ["sequential", "shared"])
@pytest.mark.parametrize("chunk", [3, 30])
def test_assembled_documents_equal_the_row_computed_at_once(positions, chunk):
    documents = [encode(A), encode(B)]
    paged, allocator, ab = assembled(documents, positions=positions)
    paged, ba = assemble(paged, allocator, documents, (1, 0), positions, tail_pages=2)
    found = tail_of(paged, [ab, ba], chunk=chunk)
    pages = document_pages([ab, ba], [len(TAIL)] * 2, WIDTH)
    ids = np.zeros((2, WIDTH * PAGE), np.int32)
    for row, parts in enumerate([(A, B, TAIL), (B, A, TAIL)]):
        for at, part in zip((0, 32, 64), parts, strict=True):
            ids[row, at : at + len(part)] = part
    wanted = full(model(), jnp.asarray(ids), pages.positions, pages.tokens)[:, 64 : 64 + len(TAIL)]
    assert relative(found, wanted) < 1e-5


@pytest.mark.long
def test_swapping_a_document_equals_assembling_anew_and_writes_its_pages_only():
    paged, allocator, ab = assembled([encode(A), encode(B)])
    before = jax.device_get(paged)
    after, ac = swap(paged, allocator, ab, 1, encode(C))
    after, cc = assemble(after, allocator, [encode(A), encode(C)], tail_pages=2)
    out = tail_of(after, [ac, cc])
    assert np.array_equal(*out)
    mine = {*ac.slots[1].pages, *(page for slot in cc.slots for page in slot.pages)}
    others = np.array([page for page in range(PAGES) if page not in mine])
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.array_equal(x[others], np.asarray(y)[others])
    allocator.check()
    release(allocator, ac)
    release(allocator, cc)
    assert allocator.free == PAGES


def test_documents_are_written_into_the_cache_without_a_copy():
    empty = cache(PAGES, False)
    arrays = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(empty)]
    paged, assembly = assemble(empty, allocator := PageAllocator(PAGES, PAGE), [encode(A)])
    swapped, _ = swap(paged, allocator, assembly, 0, encode(C))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(swapped)] == arrays
    # what was given is gone, so that nobody can read the old documents by mistake
    assert all(x.is_deleted() for x in jax.tree.leaves((empty, paged)))


def test_several_tails_share_their_documents():
    paged, allocator, first = assembled([encode(A), encode(B)])
    second = fork(allocator, first)
    assert allocator.free == PAGES - 4 - 2 * 2
    out = tail_of(paged, [first, second])
    assert np.array_equal(*out)
    _, swapped = swap(paged, allocator, second, 0, encode(C))
    # the other tail still reads them
    assert not set(swapped.slots[0].pages) & set(first.slots[0].pages)
    allocator.check()


def test_the_order_of_documents_does_not_matter_with_shared_positions():
    documents = [encode(A, DENSE), encode(B, DENSE)]
    for positions, same in (("shared", True), ("sequential", False)):
        paged, allocator, ab = assembled(documents, DENSE, positions=positions)
        paged, ba = assemble(paged, allocator, documents, (1, 0), positions, tail_pages=2)
        assert (relative(*tail_of(paged, [ab, ba], DENSE)) < 1e-5) == same


def test_one_document_is_the_plain_sequence():
    paged, allocator, one = assembled([encode(A, DENSE)], DENSE)
    out = tail_of(paged, [one, fork(allocator, one)], DENSE)
    row = [*A, *TAIL]
    ids = np.zeros((2, WIDTH * PAGE), np.int32)
    ids[:, : len(row)] = row
    where = sequences(jnp.array([len(row)] * 2), WIDTH * PAGE)
    wanted = full(model(DENSE), jnp.asarray(ids), where.order, where)[:, len(A) : len(row)]
    assert relative(out, wanted) < 1e-5


def test_documents_of_other_weights_are_refused():
    paged, allocator, assembly = assembled([encode(A)])
    fingerprint = encode(B).fingerprint
    stale = dataclasses.replace(
        encode(B), fingerprint=dataclasses.replace(fingerprint, weights="other")
    )
    with pytest.raises(StaleDocument, match=f"weights='other'.* expected .*weights='{weights()}'"):
        swap(paged, allocator, assembly, 0, stale)
    with pytest.raises(StaleDocument, match="weights='other'"):
        assemble(paged, allocator, [encode(A), stale])
    others = [
        fingerprint_weights(model(), "other"),
        fingerprint_weights(model(METHODS, seed=1), repr(METHODS)),
    ]
    assert weights() == fingerprint_weights(model(), repr(METHODS)) and weights() not in others
    allocator.check()


def test_errors_name_the_values():
    paged, allocator, assembly = assembled([encode(A)])
    with pytest.raises(ValueError, match="positions='random' must be one of"):
        assemble(paged, allocator, [encode(A)], positions="random")
    with pytest.raises(ValueError, match=r"order=\[0, 0\] must hold each of 2 documents once"):
        assemble(paged, allocator, [encode(A), encode(B)], (0, 0))
    with pytest.raises(ValueError, match="not rotated"):
        assemble(cache(PAGES), allocator, [encode(A)])
    with pytest.raises(ValueError, match="5 layers does not fit a cache with page=16 and 1"):
        assemble(cache(PAGES, False, DENSE), allocator, [encode(A)])
    with pytest.raises(ValueError, match="tail=33 tokens do not fit"):
        document_pages([assembly], [33], WIDTH)
    free = allocator.free
    allocator.take(free)
    with pytest.raises(OutOfPages, match="needed=2 pages, free=0"):
        assemble(paged, allocator, [encode(B)])
    swap(paged, allocator, assembly, 0, encode(B))  # into the pages that it lets go of
