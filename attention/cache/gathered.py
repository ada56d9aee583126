"""Pages of a dense layer laid side by side for several decode steps, the part that rows share only
once.

A dispatch decodes several tokens of every row. Where no kernel reads pages from where they lie, to
gather the rows' pages again for each token costs more than the attention itself. They are therefore
gathered once, and the new keys are put back into the pages at the end.

Rows that begin with the same pages, as the trajectories of a group do, read them together. A tile
is a set of rows with the same prefix. Their queries meet the keys of the prefix in one matrix
product (as in Hydragen, 2402.05099). Which prefix a row has depends on the row alone, never on what
else is in the batch, and so do the numbers that are computed for it.

A row's own part lies in blocks of a fixed size. A block that no row has reached is neither gathered
nor attended to. The parts are merged in a fixed order, in which a part without a visible key
changes nothing. The numbers of a row therefore do not depend on how long the others are.

Dimensions: B rows, T new tokens of a row, M tiles, R rows of a tile, K key/value heads, G query
heads of each, H head size, X places of a prefix, O of a block of a row's own part.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.cache.paged import PagedCache
from attention.keys import Pair
from pallas_kernels.finite import kept
from pallas_kernels.paged.reference import put
from pallas_kernels.tokens import MASKED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedRows:
    """The pages of the rows of a dispatch, int32, and which rows share a prefix."""

    # Each row's pages after the shared prefix, -1 for none.
    own: Int[Array, "B P"]
    # Tokens of each row's prefix, a whole number of pages.
    starts: Int[Array, " B"]
    # The rows of each tile, which share a prefix; -1 for none.
    tiles: Int[Array, "M R"]
    # The pages of each tile's prefix, -1 for none.
    prefixes: Int[Array, "M Q"]
    # How many of the tiles are in use.
    num_tiles: Int[Array, " 1"]
    # Tokens of each of the pages of ``own`` and of ``prefixes``, as in ``tables.Runs.filled``. None
    # where no row has documents, so that no place before a row's end is empty.
    own_filled: Int[Array, "B P"] | None = None
    prefixes_filled: Int[Array, "M Q"] | None = None

    def in_own(self, first: int, block: int, page: int) -> Bool[Array, "B O"] | bool:
        """True where the places of a block of the rows' own parts are no padding.

        first: the number of the block's first page. page: tokens of a page.
        """
        if self.own_filled is None:
            return True
        filled = self.own_filled[:, first : first + block // page]
        found = _in_pages(filled, page)
        return jnp.pad(found, ((0, 0), (0, block - found.shape[1])))

    def in_prefix(self, tile, page: int) -> Bool[Array, " X"] | bool:
        """True where the places of a tile's prefix are no padding."""
        filled = self.prefixes_filled
        return True if filled is None else _in_pages(filled[tile], page)


def _in_pages(filled: Int[Array, "*rows P"], page: int) -> Bool[Array, "*rows places"]:
    """True where a place of pages is among the first ``filled`` ones of its page."""
    found = jnp.arange(page) < filled[..., None]
    return found.reshape(*filled.shape[:-1], -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheredPages:
    """The keys and values of a layer."""

    # Of the tiles' prefixes, [M, K, X, H].
    prefix: Pair
    # Of the rows' own parts, in blocks [B, K, O, H].
    own: tuple[Pair, ...]
    # Tokens of a page.
    page: int = dataclasses.field(metadata=dict(static=True))


def gather(
    cache: PagedCache,
    layer: int,
    rows: SharedRows,
    block: int,
    reach: Int[Array, ""],
    firsts: Int[Array, " B"],
) -> GatheredPages:
    """A layer's pages side by side, in blocks of ``block`` tokens.

    reach: the furthest place of any row's own part that will be attended to, counted from the start
      of that part.
    firsts: the first place of each row that is not written yet. Places from there on become zeros,
      because what a page held there before may not be finite, and 0 times it would be NaN. To do it
      here once for a dispatch costs nothing for each token.
    """
    pages = cache.layers[layer]["main"]
    each = block // cache.page

    def side_by_side(x, tables):
        found = jnp.where((tables >= 0)[..., None, None, None], x[jnp.maximum(tables, 0)], 0)
        return jnp.moveaxis(found, -4, -3).reshape(*tables.shape[:-1], x.shape[1], -1, x.shape[3])

    def prefixes(x):
        def put_tile(at, out):
            found = side_by_side(x, rows.prefixes[at])
            if rows.prefixes_filled is not None:  # padding may hold anything, as below
                found = jnp.where(rows.in_prefix(at, cache.page)[:, None], found, 0)
            return out.at[at].set(found)

        places = rows.prefixes.shape[1] * cache.page
        empty = jnp.zeros((rows.tiles.shape[0], x.shape[1], places, x.shape[3]), x.dtype)
        return jax.lax.fori_loop(0, rows.num_tiles[0], put_tile, empty)

    def own(first: int) -> Pair:
        tables = rows.own[:, first : first + each]
        tables = jnp.pad(tables, ((0, 0), (0, each - tables.shape[1])), constant_values=-1)
        shape = (tables.shape[0], pages[0].shape[1], block, pages[0].shape[3])
        written = first * cache.page + jnp.arange(block) < (firsts - rows.starts)[:, None]
        written &= rows.in_own(first, block, cache.page)
        written = written[:, None, :, None]
        # a block that no row reaches is not gathered
        return jax.lax.cond(
            first * cache.page <= reach,
            lambda: tuple(jnp.where(written, side_by_side(x, tables), 0) for x in pages),
            lambda: tuple(jnp.zeros(shape, x.dtype) for x in pages),
        )

    return GatheredPages(
        tuple(prefixes(x) for x in pages),
        tuple(own(at) for at in range(0, rows.own.shape[1], each)),
        cache.page,
    )


def write(
    gathered: GatheredPages, rows: SharedRows, places: Int[Array, "B T"], new: Pair
) -> GatheredPages:
    """The gathered pages with the keys and values [B, T, K, H] of new tokens.

    places: of the tokens; at -1 nothing is written.
    """
    index = jnp.arange(places.shape[0])[:, None]
    new = kept(*new)  # as ``put`` does

    def block(number: int, pair: Pair) -> Pair:
        size = pair[0].shape[2]
        at = places - rows.starts[:, None] - number * size
        # A token of another block must not be written. At ``size`` and above it is out of range and
        # dropped; a negative index would wrap around.
        at = jnp.where((places < 0) | (at < 0), size, at)
        return tuple(
            x.at[index, :, at].set(y.astype(x.dtype), mode="drop")
            for x, y in zip(pair, new, strict=True)
        )

    return dataclasses.replace(
        gathered, own=tuple(block(number, pair) for number, pair in enumerate(gathered.own))
    )


def put_back(
    cache: PagedCache,
    layer: int,
    gathered: GatheredPages,
    rows: SharedRows,
    firsts: Int[Array, " B"],
    counts,
    steps: int,
) -> PagedCache:
    """The cache with the keys and values of each row's new tokens written into its pages.

    firsts: [B], the place of each row's first new token. counts: [B], its new tokens, at most
    ``steps``.
    """
    offset = firsts - rows.starts  # in the row's own part
    step = jnp.arange(steps)
    index = jnp.where(step < counts[:, None], offset[:, None] + step, -1)  # [B, steps]
    page = jnp.take_along_axis(rows.own, jnp.maximum(index, 0) // cache.page, axis=1)
    # a page past the end: the write is dropped
    page = jnp.where(index < 0, cache.num_pages, page)

    # the new tokens [B, steps, K, H], each from the block that it lies in
    def new(blocks):
        found = jnp.zeros((*index.shape, blocks[0].shape[1], blocks[0].shape[3]), blocks[0].dtype)
        for number, x in enumerate(blocks):
            size = x.shape[2]
            inside = (index // size == number)[:, :, None, None]
            at = jnp.where(index // size == number, index % size, 0)[:, None, :, None]
            found = jnp.where(
                inside, jnp.take_along_axis(x, at, axis=2).transpose(0, 2, 1, 3), found
            )
        return found

    fresh = tuple(new(blocks) for blocks in zip(*gathered.own, strict=True))
    pages = put(cache.layers[layer]["main"], fresh, page, index % cache.page)
    return cache.with_layer(layer, {**cache.layers[layer], "main": pages})


def attend(
    gathered: GatheredPages,
    rows: SharedRows,
    q: Float[Array, "B T N H"],
    places: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Dense attention of queries to their row's prefix and to its own keys up to ``places``.

    q: rotated.
    """
    batch, count, num_heads, size = q.shape
    num_kv_heads = gathered.prefix[0].shape[1]
    # a row's queries meet its keys in one product, and so do the heads of a group
    q = q.reshape(batch, count, num_kv_heads, -1, size).swapaxes(1, 2)
    q = q.reshape(batch, num_kv_heads, -1, size) * jnp.asarray(size**-0.5, q.dtype)
    # one key at least, for queries without a token
    last = jnp.maximum(places - rows.starts[:, None], 0)
    parts = None
    for number, pair in enumerate(gathered.own):
        block = pair[0].shape[2]
        real = rows.in_own(number * block // gathered.page, block, gathered.page)
        parts = _attend_block(q, pair, last - number * block, real, parts)
    # tokens of each tile's prefix, which are those of its first row
    lengths = jnp.where(rows.tiles[:, 0] < 0, 0, rows.starts[jnp.maximum(rows.tiles[:, 0], 0)])
    prefix_places = jnp.arange(gathered.prefix[0].shape[2])

    def tile(at, parts):
        members = rows.tiles[at]
        queries = jnp.moveaxis(q[jnp.maximum(members, 0)], 0, 1)  # [K, R, G, H]
        flat = queries.reshape(num_kv_heads, -1, size)
        seen = (prefix_places < lengths[at]) & rows.in_prefix(at, gathered.page)
        found = _attention(flat, gathered.prefix[0][at], gathered.prefix[1][at], seen[None, None])
        # empty members go to a row past the end, which is dropped
        index = jnp.where(members < 0, batch, members)

        def scatter(part, x):
            x = jnp.moveaxis(x.reshape(num_kv_heads, members.shape[0], -1, x.shape[-1]), 1, 0)
            return part.at[index].set(x, mode="drop")

        return jax.tree.map(scatter, parts, found)

    def with_prefixes(parts):
        return _merged(parts, jax.lax.fori_loop(0, rows.num_tiles[0], tile, _nothing(q)))

    # to merge with nothing would change no bit, and takes time
    shared = rows.num_tiles[0] > 0
    out, _, total = jax.lax.cond(shared, with_prefixes, lambda parts: parts, parts)
    out = (out / total).reshape(batch, num_kv_heads, count, -1, size).swapaxes(1, 2)
    return out.reshape(batch, count, num_heads, size).astype(q.dtype)


def _nothing(q):
    """The part of attention to no key at all, as ``_attention`` returns it."""
    shape = (*q.shape[:-1], 1)
    return jnp.zeros(q.shape, jnp.float32), jnp.full(shape, MASKED), jnp.zeros(shape)


def _attend_block(q, pair: Pair, last, real, parts):
    """``parts`` merged with attention to one block of the rows' own keys.

    parts: of the blocks before, None for the first one. Every query sees a place of that.
    last: [B, T], the last place of the block that each query sees; negative if it sees none. real:
    see ``SharedRows.in_own``.
    """

    def found():
        seen = jnp.arange(pair[0].shape[2]) <= last[..., None]
        seen &= real if real is True else real[:, None]
        # the queries of ``q`` are T times the heads of a group; one is broadcast
        seen = seen if last.shape[1] == 1 else jnp.repeat(seen, q.shape[2] // last.shape[1], axis=1)
        return _attention(q, *pair, seen[:, None])

    if parts is None:
        return found()
    reached = jnp.any(last >= 0)
    return jax.lax.cond(reached, lambda: _merged(parts, found()), lambda: parts)


def _attention(q, k, v, seen):
    """One part of a softmax, not yet divided by its sum, for q [..., Q, H] that is scaled already.

    Returns (weighted values [..., Q, H], highest score [..., Q, 1], total weight [..., Q, 1]).
    """
    scores = jnp.einsum(
        "...QH,...SH->...QS", q, k.astype(q.dtype), preferred_element_type=jnp.float32
    )
    scores = jnp.where(seen, scores, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    out = jnp.einsum(
        "...QS,...SH->...QH",
        weights.astype(q.dtype),
        v.astype(q.dtype),
        preferred_element_type=jnp.float32,
    )
    return out, top, jnp.sum(weights, axis=-1, keepdims=True)


def _merged(a, b):
    """The part of attention to two sets of keys together, from the parts of each."""
    # A part without a visible key has top MASKED and total 0. Beside another one its share is 0 and
    # the other's is exactly 1, so that it changes no bit.
    top = jnp.maximum(a[1], b[1])
    a_share = jnp.exp(a[1] - top)
    b_share = jnp.exp(b[1] - top)
    return a[0] * a_share + b[0] * b_share, top, a[2] * a_share + b[2] * b_share
