"""Documents encoded once: their keys and values are put together in a paged cache, in any order,
with no prefill.

Documents do not see each other (squid attention). The keys and values of a document therefore do
not depend on its neighbours. Its keys are kept as they are before rotation, and rotated on use, so
that they do not depend on its place either. A document fills whole pages. The tail that follows
(the question, the conversation) sees all documents.

Every document carries a fingerprint of its tokens and of the weights that encoded it. A document of
other weights is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attention.cache.paged import PagedCache
from attention.cache.pages import PageAllocator
from attention.cache.storage import nbytes
from attention.cache.tables import Pages, Tables
from attention.methods.method import Keys, LayerPages, Method
from pallas_kernels.finite import kept
from pallas_kernels.tokens import TAIL, Tokens, sequences

# A function of (token ids [1, T], who sees whom) that returns each layer's keys, not rotated, and
# values.
KeysOf = Callable[[jax.Array, Tokens], tuple[Keys, ...]]
POSITIONS = ("sequential", "shared")


class StaleDocument(ValueError):
    """A document of other weights or of other tokens."""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Hashes of a document's tokens and of the weights that encoded it."""

    tokens: str
    weights: str


def fingerprint_tokens(tokens: Sequence[int]) -> str:
    """Hash of token ids."""
    return hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=16).hexdigest()


def fingerprint_weights(params, settings: str = "") -> str:
    """Hash of a pytree of arrays: their names, shapes, dtypes and bits.

    settings: whatever else keys depend on, such as the methods of attention.
    """
    total = hashlib.blake2b(settings.encode(), digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaf = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        total.update(leaf.tobytes())
    return total.hexdigest()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DocumentKV:
    """All that the layers' attention reads of a document: keys before rotation, and values."""

    # For every layer, arrays [pages, ...] laid out as in a cache.
    layers: tuple[LayerPages, ...]
    # Tokens of the document.
    length: int = dataclasses.field(metadata=dict(static=True))
    # Tokens of a page.
    page: int = dataclasses.field(metadata=dict(static=True))
    fingerprint: Fingerprint = dataclasses.field(metadata=dict(static=True))

    @property
    def num_pages(self) -> int:
        """Pages that the document fills."""
        return -(-self.length // self.page)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return nbytes(self.layers)


def encode_document(
    keys_of: KeysOf, methods: Sequence[Method], tokens: Sequence[int], weights: str, page: int
) -> DocumentKV:
    """Encodes a document by itself, at positions from 0.

    keys_of: the model. It gets the tokens padded to whole pages, so that it is compiled once for
    each number of pages. methods: the method of every layer. weights: their fingerprint.
    """
    if not tokens:
        raise ValueError("a document needs tokens")
    padded = np.zeros((1, -(-len(tokens) // page) * page), np.int32)
    padded[0, : len(tokens)] = tokens
    keys = keys_of(jnp.asarray(padded), sequences(jnp.array([len(tokens)]), padded.shape[1]))
    layers = _paged(keys, methods=tuple(methods), page=page)
    return DocumentKV(layers, len(tokens), page, Fingerprint(fingerprint_tokens(tokens), weights))


def _paged(
    keys: tuple[Keys, ...], methods: tuple[Method, ...], page: int
) -> tuple[LayerPages, ...]:
    """Keys and values of one row in the layout of pages."""
    layers = zip(methods, keys, strict=True)
    pages = tuple(method.document_pages(layer, page) for method, layer in layers)
    # as new tokens are written to pages
    return tuple({name: kept(*pair) for name, pair in layer.items()} for layer in pages)


_paged = jax.jit(_paged, static_argnames=("methods", "page"))


@dataclasses.dataclass(frozen=True)
class Slot:
    """A document in the pages of a cache."""

    pages: tuple[int, ...]
    length: int
    fingerprint: Fingerprint


@dataclasses.dataclass(frozen=True)
class Assembly:
    """Documents in the order in which they are read, and the pages of the tail."""

    # The documents, in order.
    slots: tuple[Slot, ...]
    # The pages of the tail.
    tail: tuple[int, ...]
    # One of POSITIONS. "sequential" counts through the documents in their order. "shared" starts
    # every document at 0 and the tail after the longest one, so that the order makes no difference.
    positions: str
    # Tokens of a page.
    page: int

    @property
    def tail_place(self) -> int:
        """The place of the tail's first token."""
        return sum(len(slot.pages) for slot in self.slots) * self.page


def assemble(
    cache: PagedCache,
    allocator: PageAllocator,
    documents: Sequence[DocumentKV],
    order: Sequence[int] | None = None,
    positions: str = "sequential",
    tail_pages: int = 0,
) -> tuple[PagedCache, Assembly]:
    """Writes documents into pages of their own, without running the model.

    cache: it is donated, so only the one that is returned may be used afterwards.
    order: the indices of the documents in the order in which they are read. tail_pages: pages for
    the tokens that follow.
    Raises OutOfPages, or StaleDocument for documents of several weights.
    """
    if positions not in POSITIONS:
        raise ValueError(f"{positions=} must be one of {POSITIONS}")
    order = range(len(documents)) if order is None else order
    if sorted(order) != list(range(len(documents))):
        raise ValueError(f"order={list(order)} must hold each of {len(documents)} documents once")
    documents = [documents[index] for index in order]
    for document in documents:
        _check(cache, document, documents[0].fingerprint.weights)
    taken = allocator.take(sum(document.num_pages for document in documents) + tail_pages)
    slots = []
    for document in documents:
        own = taken[: document.num_pages]
        taken = taken[document.num_pages :]
        cache = _put(cache, jnp.array(own), document.layers)
        slots.append(Slot(tuple(own), document.length, document.fingerprint))
    return cache, Assembly(tuple(slots), tuple(taken), positions, cache.page)


def swap(
    cache: PagedCache, allocator: PageAllocator, assembly: Assembly, slot: int, document: DocumentKV
) -> tuple[PagedCache, Assembly]:
    """Puts another document in the place of the one in ``slot``; writes its pages and no others.

    cache: it is donated, so only the one that is returned may be used afterwards.

    The keys of the tail depend on what the tail has seen. A tail that was written before must be
    written again. Raises OutOfPages, or StaleDocument if the document was encoded by other weights
    than the others.
    """
    old = assembly.slots[slot]
    _check(cache, document, old.fingerprint.weights)
    own = allocator.exchange(old.pages, document.num_pages)
    cache = _put(cache, jnp.array(own), document.layers)
    slots = list(assembly.slots)
    slots[slot] = Slot(tuple(own), document.length, document.fingerprint)
    return cache, dataclasses.replace(assembly, slots=tuple(slots))


def fork(allocator: PageAllocator, assembly: Assembly) -> Assembly:
    """The same documents, on the same pages, before another tail. Raises OutOfPages."""
    tail = allocator.take(len(assembly.tail))
    allocator.share(page for slot in assembly.slots for page in slot.pages)
    return dataclasses.replace(assembly, tail=tuple(tail))


def release(allocator: PageAllocator, assembly: Assembly) -> None:
    """Lets go of all pages of an assembly."""
    allocator.drop([*(page for slot in assembly.slots for page in slot.pages), *assembly.tail])


def document_pages(assemblies: Sequence[Assembly], tails: Sequence[int], width: int) -> Pages:
    """The rows of a paged cache, one for each assembly, as attention sees them.

    tails: tokens of each tail. width: pages of a table.
    """
    page = assemblies[0].page
    tables = np.full((len(assemblies), width), -1, np.int32)
    fields = np.zeros((5, len(assemblies), width * page), np.int32)  # of Tokens, and positions
    for row, (assembly, tail) in enumerate(zip(assemblies, tails, strict=True)):
        pages = [*(page for slot in assembly.slots for page in slot.pages), *assembly.tail]
        if len(pages) > width or tail > len(assembly.tail) * page:
            raise ValueError(
                f"{len(pages)} pages and {tail=} tokens do not fit in {width=}, "
                f"{len(assembly.tail)} tail"
            )
        tables[row, : len(pages)] = pages
        lengths = [slot.length for slot in assembly.slots]
        shared = assembly.positions == "shared"
        runs = [
            (number, slot.length, len(slot.pages))
            for number, slot in enumerate(assembly.slots, start=1)
        ]
        at, position = 0, 0
        for number, length, count in [*runs, (TAIL, tail, len(assembly.tail))]:
            places = np.arange(at, at + length)
            # shared positions start again with every document; the tail follows the longest
            if shared:
                position = max(lengths, default=0) if number == TAIL else 0
            fields[:, row, places] = np.stack(
                np.broadcast_arrays(1, 0, number, places, position + np.arange(length)), axis=0
            )
            # a document fills whole pages, the last one perhaps with empty places
            at = at + count * page
            position = position + length
    fields = jnp.asarray(fields)
    return Pages(Tables.same(jnp.asarray(tables)), Tokens(*fields[:4]), fields[4])


def check_fingerprint(found: Fingerprint, expected: Fingerprint) -> None:
    """Raises StaleDocument unless they are equal."""
    if found != expected:
        raise StaleDocument(f"the document has {found}, expected {expected}")


def _check(cache: PagedCache, document: DocumentKV, weights: str) -> None:
    if cache.rotated:
        raise ValueError("documents need a cache of keys that are not rotated")
    check_fingerprint(
        document.fingerprint, dataclasses.replace(document.fingerprint, weights=weights)
    )
    if document.page != cache.page or len(document.layers) != len(cache.layers):
        raise ValueError(
            f"a document with page={document.page} and {len(document.layers)} layers does not fit "
            "a cache with "
            f"page={cache.page} and {len(cache.layers)}"
        )


# Without the donation every page of the cache would be copied, not only those that are written.
@functools.partial(jax.jit, donate_argnums=0)
def _put(cache: PagedCache, at, layers: tuple[LayerPages, ...]) -> PagedCache:
    """The cache with a document's arrays on pages ``at``."""

    def layer(old: LayerPages, new: LayerPages) -> LayerPages:
        written = {
            name: tuple(
                x.at[at].set(y.astype(x.dtype)) for x, y in zip(old[name], pair, strict=True)
            )
            for name, pair in new.items()
        }
        return {**old, **written}

    written = tuple(layer(old, new) for old, new in zip(cache.layers, layers, strict=True))
    return dataclasses.replace(cache, layers=written)
