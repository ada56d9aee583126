"""Documents encoded once: their keys and values, put together in a paged cache in any order, with
no prefill.

Documents do not see each other (squid attention), so that what a layer knows of one does not depend
on its neighbours; its keys are kept as they are before rotation and rotated on use, so that it does
not depend on its place either. A document fills whole pages. The tail that follows (the question,
the conversation) sees all of them.

A fingerprint of the tokens and of the weights goes with every document, and one of other weights is
refused.
"""

from __future__ import annotations

import dataclasses
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
from pallas_kernels.tokens import TAIL, Tokens, sequences

# (token ids [1, T], who sees whom) to each layer's keys, not rotated, and values.
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
    """Hash of a pytree of arrays: names, shapes, dtypes and bits. settings: what else keys depend
    on, as methods.
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
    """Keys before rotation, and values, in the layout of pages: all that the layers' attention
    reads.
    """

    # Arrays [pages, ...] as in a cache.
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
    """A document alone, positions from 0.

    keys_of: the model; it sees the tokens padded to whole pages, so that it is compiled once for
    each number of pages. methods: of every layer. weights: their fingerprint.
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
    return tuple(method.document_pages(layer, page) for method, layer in layers)


_paged = jax.jit(_paged, static_argnames=("methods", "page"))


@dataclasses.dataclass(frozen=True)
class Slot:
    """A document in the pages of a cache."""

    pages: tuple[int, ...]
    length: int
    fingerprint: Fingerprint


@dataclasses.dataclass(frozen=True)
class Assembly:
    """Documents in the order in which they are read, and the pages of the tail.

    positions: "sequential" counts through the documents as they are ordered; "shared" starts every
    document at 0 and the tail after the longest, so that the order makes no difference.
    """

    slots: tuple[Slot, ...]
    tail: tuple[int, ...]
    positions: str
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
    """Writes documents into pages of their own; nothing is computed.

    order: of the documents, by their index. tail_pages: pages for the tokens that follow.
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
    """Another document in place of one: its pages are written and no others.

    The tail's own keys depend on what it has seen, so a tail that was written before is to be
    written again. Raises OutOfPages, or StaleDocument if the document is not of the weights of the
    others.
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
    """What attention needs to know of one row per assembly. tails: tokens of the tails. width:
    pages of the tables.
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
            if shared:
                position = max(lengths, default=0) if number == TAIL else 0
            fields[:, row, places] = np.stack(
                np.broadcast_arrays(1, 0, number, places, position + np.arange(length)), axis=0
            )
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


@jax.jit
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
