"""The arrays of a paged KV cache and how they are written: an explicit pytree, every function
returns a new one.

A page holds the tokens of one page of ``pages.PageAllocator`` in every layer. Under NSA and MoBA a
page is a block of the selection. A sequence's table lists its pages: the token at place p lies in
page table[p // page] at p % page.

What a page holds depends on its tokens and on those before them only, so that any sequence with
that prefix can use it. A compressed key therefore lies with the last token of its stretch, not with
the first. The keys that NSA compresses are needed until their last stretch is complete, so a page
keeps the last ``length`` of them only, in a ring.

``rotated`` says whether keys are kept as the positions of their places rotate them (sequences), or
as they are and rotated on use (documents, whose positions change when they are put elsewhere).

Dimensions: B rows, T tokens, P pages of a table, K key/value heads, H head size, U stretches that
may become complete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from attention.methods import Method
from attention.moba import MoBA
from attention.nsa import NSA
from pallas_kernels.paged.lists import lookup

# (k, v) of the same shape.
Pair = tuple[jax.Array, jax.Array]
# (k [B, S, K, H], v) to one compressed key and value per stretch from the first place on.
Compress = Callable[[jax.Array, jax.Array], Pair]
# (keys [B, S, K, H], positions [B, S]) to rotated keys.
Rotate = Callable[[jax.Array, jax.Array], jax.Array]

# A page past all others.
_NONE = jnp.iinfo(jnp.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerPages:
    """The pages of one layer; what its method does not need is None.

    main, window: (k, v) [pages, K, page, H]. means: [pages, K, H] float32, of a MoBA page's rotated
    keys. compressed: (k, v) [pages, K, page / stride, H], of the stretches whose last token is in
    the page. recent: (k, v) [pages, K, length, H], not rotated, the page's last ``length`` keys and
    values to be compressed, offset modulo ``length``.
    """

    main: Pair
    means: jax.Array | None = None
    compressed: Pair | None = None
    recent: Pair | None = None
    window: Pair | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """All layers' pages. page: tokens of a page. rotated: whether keys are kept rotated."""

    layers: tuple[LayerPages, ...]
    methods: tuple[Method, ...] = dataclasses.field(metadata=dict(static=True))
    page: int = dataclasses.field(metadata=dict(static=True))
    rotated: bool = dataclasses.field(metadata=dict(static=True))

    @property
    def num_pages(self) -> int:
        """Pages of every layer."""
        return self.layers[0].main[0].shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewKeys:
    """(k, v) [B, T, K, H] of new tokens. main, window: keys rotated as the cache keeps them.

    raw: of an NSA layer, what is compressed; its keys are not rotated.
    """

    main: Pair
    raw: Pair | None = None
    window: Pair | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """Which page of each array a page of a row is, -1 for none; ``same`` in caches where all arrays
    have all pages.

    recent: of the window's keys and of those to be compressed. compressed: None where each row's
    lie one after another and what a row has not written is finite.
    """

    main: Int[Array, "B P"]
    recent: Int[Array, "B P"]
    compressed: Int[Array, "B P"] | None

    @classmethod
    def same(cls, tables: Int[Array, "B P"]) -> Tables:
        """One table for all arrays."""
        return cls(tables, tables, tables)


def page_size(methods: Sequence[Method], page: int | None = None) -> int:
    """Tokens of a page: the block of the sparse layers, else ``page``."""
    blocks = {method.block for method in methods if isinstance(method, NSA | MoBA)}
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
    rotated: bool = True,
) -> PagedCache:
    """A cache of zeros. methods: of every layer."""
    page = page_size(methods, page)

    def pair(length: int) -> Pair:
        shape = (num_pages, num_kv_heads, length, head_dim)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def layer(method: Method) -> LayerPages:
        if isinstance(method, NSA):
            return LayerPages(
                pair(page), None, pair(page // method.stride), pair(method.length), pair(page)
            )
        means = isinstance(method, MoBA) and rotated
        return LayerPages(
            pair(page), jnp.zeros((num_pages, num_kv_heads, head_dim)) if means else None
        )

    return PagedCache(tuple(layer(method) for method in methods), tuple(methods), page, rotated)


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
    tables: Tables,
    places: Int[Array, "B T"],
    new: NewKeys,
    *,
    compress: Compress | None = None,
    rotate: Rotate | None = None,
) -> PagedCache:
    """The cache with the keys and values of new tokens in one layer.

    places: consecutive in a row, then -1 for padding, which is not written.
    compress: for an NSA layer; what came before must have been written. rotate: for an NSA layer of
    a rotated cache.
    """
    pages = cache.layers[layer]
    method = cache.methods[layer]
    at = _where(tables.main, places, cache.page)
    changes: dict = {"main": put(pages.main, new.main, *at)}
    if isinstance(method, NSA):
        if compress is None or new.raw is None or new.window is None:
            raise ValueError(f"{layer=} is NSA: compress, new.raw and new.window are needed")
        at = _where(tables.recent, places, cache.page)
        changes["window"] = put(pages.window, new.window, *at)
        changes["compressed"] = _compressed(
            cache, pages, method, tables, places, new.raw, compress, rotate
        )
        changes["recent"] = _recent(cache, pages, method, places, new.raw, *at)
    if pages.means is not None:
        changes["means"] = _means(cache, changes["main"][0], pages.means, tables.main, places)
    layers = list(cache.layers)
    layers[layer] = dataclasses.replace(pages, **changes)
    return dataclasses.replace(cache, layers=tuple(layers))


def _where(tables, places, page):
    """(page, offset) [B, T] of every place; a page past all others where nothing is to be read or
    written.
    """
    found = lookup(tables, jnp.where(places < 0, -1, places // page))
    return jnp.where(found < 0, _NONE, found), places % page


def put(pages: Pair, new: Pair, page, offset) -> Pair:
    """Pages with the values new [B, T, K, H] at (page, offset) [B, T]; a page past all others is
    not written.
    """
    return tuple(
        x.at[page, :, offset].set(y.astype(x.dtype), mode="drop")
        for x, y in zip(pages, new, strict=True)
    )


def _span(places):
    """(first, last) place of every row, [B, 1]; last is -1 in a row of padding."""
    return places[:, :1], jnp.max(places, axis=1, keepdims=True)


def _recent(cache, pages, method, places, raw, page, offset):
    """The rings with the new keys; those which later ones of the same write would overwrite are not
    written.
    """
    _, last = _span(places)
    overwritten = (offset + method.length < cache.page) & (places + method.length <= last)
    return put(pages.recent, raw, jnp.where(overwritten, _NONE, page), offset % method.length)


def _compressed(cache, pages, method, tables, places, raw, compress, rotate):
    """The compressed keys and values with those of the stretches that the new tokens complete."""
    first, last = _span(places)
    length = method.length
    stride = method.stride
    count = places.shape[1]
    # stretches, by their last stride of tokens
    units = first // stride + jnp.arange((count + stride - 1) // stride)
    reach = length - stride
    needed = first // stride * stride - reach + jnp.arange(units.shape[1] * stride + reach)
    old, offset = _where(tables.recent, jnp.where(needed >= first, -1, needed), cache.page)
    index = needed - first
    fresh = jnp.broadcast_to((index >= 0) & (needed <= last), needed.shape)[..., None, None]
    index = jnp.clip(index, 0, count - 1)[..., None, None]

    def gather(ring, new):
        kept = ring.at[old, :, offset % length].get(mode="fill", fill_value=0)
        return jnp.where(fresh, jnp.take_along_axis(new, index, axis=1), kept.astype(new.dtype))

    keys = compress(*(gather(ring, new) for ring, new in zip(pages.recent, raw, strict=True)))
    k, v = (x[:, : units.shape[1]] for x in keys)
    ends = (units + 1) * stride - 1
    if cache.rotated:
        if rotate is None:
            raise ValueError("a cache of rotated keys needs rotate for an NSA layer")
        k = rotate(k, ends)
    complete = (ends <= last) & (ends >= length - 1)
    table = tables.compressed
    if table is None:
        table = jnp.arange(tables.main.size).reshape(tables.main.shape)
    page, offset = _where(table, jnp.where(complete, ends, -1), cache.page)
    return put(pages.compressed, (k, v), page, offset // stride)


def _means(cache, keys, means, tables, places):
    """The means of the pages that were written to."""
    first, last = _span(places)
    touched = first // cache.page + jnp.arange((places.shape[1] + cache.page - 2) // cache.page + 1)
    starts = touched * cache.page
    at, _ = _where(tables, jnp.where(starts <= last, starts, -1), cache.page)
    real = (starts[..., None] + jnp.arange(cache.page) <= last[..., None])[:, :, None, :, None]
    content = jnp.where(real, keys.at[at].get(mode="clip").astype(jnp.float32), 0.0)
    mean = jnp.sum(content, axis=3) / jnp.maximum(jnp.sum(real, axis=3), 1)
    return means.at[at].set(mean, mode="drop")
