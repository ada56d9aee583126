"""A paged KV cache: an explicit pytree of pages, and attention to it.

A page of ``pages.PageAllocator`` is one page in every layer. For a method that chooses blocks it is
one block. What a page holds depends only on its tokens and on those before them, so that any
sequence with that prefix can use it.

Every method says what its layers keep in pages, how new tokens are written, and how they attend
(``methods.method``). Few queries (decoding) read only the pages that they attend to. Many queries
(a chunk of a prompt) read all pages of their sequences once and attend as in training.

Dimensions: B rows, T tokens, P pages of a table, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.cache.reader import PageReader
from attention.cache.tables import Pages, Runs
from attention.cache.writer import PageWriter
from attention.keys import Keys, Rotate
from attention.methods.method import LayerPages, LayerShape, Method, PageShape, Parameters
from pallas_kernels.tokens import Tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """All layers' pages."""

    layers: tuple[LayerPages, ...]
    # Of every layer.
    methods: tuple[Method, ...] = dataclasses.field(metadata=dict(static=True))
    # Tokens of a page.
    page: int = dataclasses.field(metadata=dict(static=True))

    @property
    def num_pages(self) -> int:
        """Pages of every layer."""
        return jax.tree.leaves(self.layers)[0].shape[0]

    def of_layer(self, layer: int) -> PagedCache:
        """A cache of one layer alone, which shares its pages."""
        return dataclasses.replace(
            self, layers=(self.layers[layer],), methods=(self.methods[layer],)
        )

    def with_layer(self, layer: int, pages: LayerPages) -> PagedCache:
        """The cache with other pages of one layer."""
        layers = list(self.layers)
        layers[layer] = pages
        return dataclasses.replace(self, layers=tuple(layers))


def page_size(methods: Sequence[Method], page: int | None = None) -> int:
    """Tokens of a page: the block of the layers that choose blocks, else ``page``."""
    blocks = {method.block_size() for method in methods if method.block_size()}
    sizes = blocks | ({page} if page is not None else set())
    if len(sizes) != 1:
        raise ValueError(
            f"one size of page is needed: {page=}, blocks of the layers {sorted(blocks)}"
        )
    return sizes.pop()


def init_cache(
    methods: Sequence[Method],
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    dtype,
    *,
    page: int | None = None,
    undone: int = 0,
    layer: LayerShape | None = None,
) -> PagedCache:
    """A cache of zeros.

    methods: the method of every layer. undone, layer: see ``PageShape``.
    """
    page = page_size(methods, page)
    shape = PageShape(num_pages, num_kv_heads, page, head_dim, dtype, undone, layer)
    layers = tuple(
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), method.pages(shape))
        for method in methods
    )
    return PagedCache(layers, tuple(methods), page)


def page_bytes(cache: PagedCache) -> int:
    """Bytes of one page in all layers."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers)) // cache.num_pages


def copy_pages(
    cache: PagedCache, sources: Int[Array, " C"], targets: Int[Array, " C"]
) -> PagedCache:
    """Pages ``sources`` copied onto ``targets`` in every layer; a target past the end is
    dropped.
    """
    return jax.tree.map(
        lambda x: x.at[targets].set(x.at[sources].get(mode="clip"), mode="drop"), cache
    )


def write(
    cache: PagedCache,
    layer: int,
    tables: Int[Array, "B P"],
    places: Int[Array, "B T"],
    new: Keys,
    *,
    parameters: Parameters,
    rotate: Rotate,
    runs: Runs | None = None,
) -> PagedCache:
    """The cache with the keys and values of new tokens in one layer.

    All tokens before them must have been written.

    places: of the tokens, consecutive in a row, then -1 for padding, which is not written.
    new: "main" and what ``Method.new_keys`` gives, those of ``rotated_when_written`` rotated.
    parameters: those of the layer's method.
    rotate: how keys are rotated, for those that a method derives.
    runs: what the rows' pages hold; None where no row has documents.

    Raises:
      ValueError: ``new`` lacks a branch that the method writes.
    """
    method = cache.methods[layer]
    _check_new(method, layer, new)
    at = PageWriter(tables, places, cache.page, rotate, runs)
    return cache.with_layer(layer, method.write(cache.layers[layer], new, at, parameters))


def attend(
    cache: PagedCache,
    layer: int,
    q: Float[Array, "B T N H"],
    q_tokens: Tokens,
    pages: Pages,
    *,
    inputs: Float[Array, "B T N parts"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention to the cache, into which the queries' own keys have been written.

    q: rotated.
    q_tokens: of consecutive places in a row, with padding at the end.
    inputs: from ``Method.head_inputs``.
    """
    read = PageReader(pages, cache.page, q.dtype)
    return cache.methods[layer].attend_pages(cache.layers[layer], q, q_tokens, read, inputs)


def write_and_attend(
    cache: PagedCache,
    layer: int,
    written: Pages,
    places: Int[Array, "B T"],
    new: Keys,
    q: Float[Array, "R t N H"],
    q_tokens: Tokens,
    pages: Pages,
    *,
    parameters: Parameters,
    rotate: Rotate,
    inputs: Float[Array, "R t N parts"] | None = None,
) -> tuple[Float[Array, "R t N H"], PagedCache]:
    """``write`` and ``attend``, where the method can by one kernel: (the result, the cache).

    written, places, new, parameters, rotate: as for ``write``, with ``written`` for its tables and
    runs. q, q_tokens, pages, inputs: as for ``attend``, of the same rows or of rows of one token.
    """
    method = cache.methods[layer]
    _check_new(method, layer, new)
    at = PageWriter(written.tables, places, cache.page, rotate, written.runs)
    read = PageReader(pages, cache.page, q.dtype)
    found = (cache.layers[layer], new, at, parameters, q, q_tokens, read, inputs)
    out, own = method.append_pages(*found)
    return out, cache.with_layer(layer, own)


def _check_new(method: Method, layer: int, new: Keys) -> None:
    if missing := set(method.rotated_when_written()) - set(new):
        raise ValueError(f"{layer=} is {method}: new keys lack {', '.join(sorted(missing))}")


def attend_and_note(
    cache: PagedCache,
    layer: int,
    q: Float[Array, "B T N H"],
    q_tokens: Tokens,
    pages: Pages,
    *,
    inputs: Float[Array, "B T N parts"] | None = None,
) -> tuple[Float[Array, "B T N H"], Int[Array, "B T C n"]]:
    """``attend`` of few queries by a method that chooses pages: (the result, their numbers)."""
    method = cache.methods[layer]
    read = PageReader(pages, cache.page, q.dtype)
    rows = (cache.layers[layer], q, q_tokens, read)
    found, picks = method.choose_pages(*rows)
    return method.attend_chosen(*rows, inputs, found, picks), picks
