"""Keys cut into blocks that no sequence straddles, so that a query can choose whole blocks.

Sparse methods number the blocks of a sequence by order: block j holds the orders [j size, (j + 1)
size).

Some rows can be cut as they are (``in_place``): those that hold one sequence from slot 0, or
documents that start at multiples of ``size``. In packed rows that is not possible. Sequences start
anywhere, and a completion continues in the middle of a block of the prompt that it shares with
others. ``aligned`` therefore gives every run of one segment, branch and document blocks of its own.
A completion's first blocks hold copies of the end of its prompt. The result says from which slot
each place is read, and is computed once for all layers.

Dimensions: B rows, T slots, S places of keys, J = S / size blocks, E = S / stride entries.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.tokens import Tokens, visible

_MOST = jnp.iinfo(jnp.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """Places of keys in whole blocks."""

    # The tokens in the places; segment 0 where a place is empty.
    tokens: Tokens
    # The slot of the row that each place is read from, -1 for none. None where place i is slot i.
    slots: Int[Array, "B S"] | None
    # For a completion's first block, which holds a copy of the end of the prompt, the prompt's
    # block of the same order. -1 for all other blocks. None where nothing is copied.
    shadows: Int[Array, "B J"] | None
    # For every query, the order from which its branch has blocks of its own. From there on the
    # branch has copies of the prompt's tokens, and the query must not see the originals as well.
    own_from: Int[Array, "B T"]
    # Places of a block.
    size: int = dataclasses.field(metadata=dict(static=True))
    # Whether no query sees a place past its own slot, because the queries lie in the places.
    causal: bool = dataclasses.field(metadata=dict(static=True))

    def place(self, x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B S *rest"]:
        """Keys, values or positions moved from the slots of the rows to their places.

        Empty places are zeros, even if x is not finite there.
        """
        if self.slots is None:
            rest = ((0, 0),) * (x.ndim - 2)
            x = jnp.pad(x, ((0, 0), (0, self.tokens.shape[1] - x.shape[1]), *rest))
            real = (self.tokens.segments > 0).reshape(*x.shape[:2], *(1 for _ in rest))
            return jnp.where(real, x, jnp.zeros((), x.dtype))
        rows = jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))
        # -1 would read the last slot; T is out of range and reads the fill value
        return rows(x, jnp.where(self.slots < 0, x.shape[1], self.slots))

    def last(self, x: Shaped[Array, "B T"], length: int, stride: int) -> Shaped[Array, "B E"]:
        """x at the last token of every stretch of ``entries``."""
        return _lasts(self.place(x), length, stride)

    @property
    def order(self) -> Int[Array, "B S"]:
        """The order of every place, past all others where it is empty."""
        return jnp.where(self.tokens.segments > 0, self.tokens.order, _MOST)

    @property
    def heads(self) -> Tokens:
        """The first token of every block, [B, J] each; it is empty only where the block is."""
        return self.tokens.map(lambda x: x[:, :: self.size])


def in_place(tokens: Tokens, size: int, parts: int = 1) -> Blocks:
    """Blocks of rows whose runs start at multiples of ``size``, in slots and in order.

    The rows are filled up with empty places, to ``parts`` times the same number of whole blocks.
    """
    padded = tokens.map(lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % (size * parts)))))
    return Blocks(padded, None, None, jnp.full(tokens.shape, _MOST), size, causal=True)


def aligned(
    tokens: Tokens, size: int, runs: int, documents: bool = False, parts: int = 1
) -> Blocks:
    """Blocks of packed rows.

    runs: most runs of one segment and branch in a row. Runs on branch 0 must start at an order that
      is a multiple of ``size``. Trees must have two levels: a run on another branch gets copies of
      the end of branch 0 only.
    documents: whether runs may be cut by documents. A document and what follows one must start at
      an order that is a multiple of ``size``, and the orders that all runs reach over, added up,
      must be no more than the slots of a row.
    parts: devices over which rows are cut; the number of blocks is a multiple of it.
    """
    # A run of n tokens takes at most its tokens, two blocks of copies, and what fills up its last
    # block: less than n + 3 size places.
    count = -(-tokens.shape[1] // size) * size + 3 * size * runs
    count += -count % (size * parts)
    if documents:
        # Every further run starts at another of the multiples of ``size`` that the runs reach over.
        # The places above hold them: these multiples cut what a run reaches over, no more. Empty
        # slots in front of a document, which are a run too, end at the border of a part.
        runs = 2 * runs + tokens.shape[1] // size + parts - 1
    place = jax.vmap(lambda row: _align(row, size, runs, count))
    slots, placed, shadows, own_from = jax.tree.map(lambda x: x.astype(jnp.int32), place(tokens))
    return Blocks(placed, slots, shadows, own_from, size, causal=False)


def _align(tokens: Tokens, size: int, runs: int, count: int):
    """One row of ``aligned``; the fields of tokens are [T]. Returns (slots, tokens, shadows,
    own_from) of ``Blocks``.

    First the runs of the row are found and given whole blocks. Then every place works out which run
    it belongs to and which slot it reads. All of it is index arithmetic over fixed shapes, ``runs``
    runs and ``count`` places, so that it compiles once.
    """
    slots = jnp.arange(tokens.order.shape[0])
    fields = (tokens.segments, tokens.branches, tokens.documents)
    # a run ends where segment, branch or document change; slot 0 always starts one
    changes = jnp.stack([x != jnp.roll(x, 1) for x in fields]).any(axis=0).at[0].set(True)
    run = jnp.cumsum(changes) - 1  # runs past the limit are dropped with their tokens
    (first,) = jnp.nonzero(changes, size=runs, fill_value=tokens.order.shape[0])
    exists = first < tokens.order.shape[0]

    # x at the first token of every run; 0 for runs that do not exist
    def of_run(x):
        return x.at[first].get(mode="fill", fill_value=0)

    segment, branch, document, start = (of_run(x) for x in (*fields, tokens.order))
    length = jax.ops.segment_sum(jnp.ones_like(slots), run, num_segments=runs)
    real = exists & (segment > 0)
    # the last run on branch 0 of the same segment: the end of the prompt, which a completion
    # continues
    number = jnp.arange(runs)
    prompt = (segment[None] == segment[:, None]) & (branch[None] == 0) & real[None]
    parent = jnp.max(jnp.where(prompt, number, -1), axis=1)
    continues = real & (branch > 0) & (parent >= 0)
    # the first run of a branch; the others are documents and what stands between and behind them,
    # perhaps with empty slots in front
    before = jnp.roll(jax.lax.cummax(jnp.where(real, number, 0)), 1)
    same = (segment == segment[before]) & (branch == branch[before])
    opens = real & ~same.at[0].set(False)
    opening = jax.lax.cummax(jnp.where(opens, number, 0))
    # Only a completion that goes on outside of documents, where its prompt ends there, can start in
    # the middle of a block. All other runs start at a multiple of ``size``, and no block or stretch
    # has tokens of them and of what stands before them.
    copies = continues & opens & (document == document[parent])
    prompt_start = start[parent]
    prompt_end = first[parent] + length[parent] - 1
    # The copies begin one block before the block in which the completion starts. A stretch that
    # reaches from there into the completion's tokens then has all its tokens in the copies.
    begin = jnp.where(copies, jnp.maximum(start // size * size - size, prompt_start), start)
    # whole blocks from ``begin``, the orders of which are multiples of ``size`` because runs on
    # branch 0 start at such orders and a completion begins at one
    places = jnp.where(real, -(-(start + length - begin) // size) * size, 0)
    offset = jnp.cumsum(places) - places

    # every place: the run it belongs to, its order, and the slot that it reads
    index = jnp.arange(count)
    owner = jnp.searchsorted(jnp.cumsum(places), index, side="right").clip(max=runs - 1)
    order = begin[owner] + index - offset[owner]
    own = first[owner] + order - start[owner]
    # places before the completion's own start are copies, counted back from the prompt's end
    slot = jnp.where(order >= start[owner], own, prompt_end[owner] - (start[owner] - 1 - order))
    full = (index < jnp.sum(places)) & (order < start[owner] + length[owner])
    placed = Tokens(
        *(jnp.where(full, x, 0) for x in (segment[owner], branch[owner], document[owner], order))
    )

    # a copied block starts in the middle of the prompt: the stretches that reach into it from the
    # block before are counted at the prompt's block, its shadow, whose score is added
    copied = copies & (begin > prompt_start)
    shadow = (offset[parent] + begin - begin[parent]) // size
    shadows = (
        jnp.full(count // size, -1)
        .at[jnp.where(copied, offset // size, count)]
        .set(shadow, mode="drop")
    )
    # a branch has blocks of its own from where its first run has them
    own_from = jnp.where(continues, begin[opening], _MOST)
    own_from = own_from.at[run].get(mode="fill", fill_value=_MOST)
    return jnp.where(full, slot, -1), placed, shadows, own_from


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
    """Overlapping stretches of ``length`` places, one every ``stride``, as keys."""

    # The last token of each stretch, [B, E]. Segment 0 where a stretch has an empty place or tokens
    # of more than one run: it then counts as no stretch.
    tokens: Tokens
    # The order of each stretch's first token.
    starts: Int[Array, "B E"]
    # How many entries later than its first token a stretch lies. 0 in rows, where entry e begins at
    # place e stride. More in pages, which keep a stretch with its last token.
    ahead: int = dataclasses.field(default=0, metadata=dict(static=True))

    def by_last(self, ahead: int) -> Entries:
        """The stretches moved ``ahead`` entries later, behind as many empty entries.

        The last ``ahead`` ones, for which the row then has no place, are dropped.
        """
        moved = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (ahead, 0)))[:, : x.shape[1]], self)
        return dataclasses.replace(moved, ahead=ahead)


def entries(blocks: Blocks, length: int, stride: int) -> Entries:
    """The stretches of a row's places."""
    first = blocks.tokens.map(lambda x: x[:, ::stride])
    last = blocks.tokens.map(lambda x: _lasts(x, length, stride))
    # A stretch is whole if its ends are of one run and as far apart in order as in places. An empty
    # place has segment 0, which the first test or the comparison of segments refuses.
    whole = (first.segments > 0) & (last.order - first.order == length - 1)
    for name in ("segments", "branches", "documents"):
        whole &= getattr(first, name) == getattr(last, name)
    tokens = last.map(lambda x: jnp.where(whole, x, 0))
    return Entries(tokens=tokens, starts=first.order)


def _lasts(x: Shaped[Array, "B S"], length: int, stride: int) -> Shaped[Array, "B E"]:
    """x at the last place of every entry; zeros past the end."""
    # cut before it is filled up: x may be long, and a padded copy of all of it is never needed
    last = x[:, length - 1 :: stride]
    return jnp.pad(last, ((0, 0), (0, -(-x.shape[1] // stride) - last.shape[1])))


def stretches(x: Float[Array, "B S K H"], length: int, stride: int) -> Float[Array, "B E K l H"]:
    """x at all ``length`` places of every entry; zeros past the end."""
    # An entry is length / stride pieces of ``stride`` places. Piece number i of all entries is x
    # shifted by i stride and cut into pieces, which needs no gather.
    count = x.shape[1] // stride
    x = jnp.pad(x, ((0, 0), (0, length), (0, 0), (0, 0)))
    parts = [
        x[:, at : at + count * stride].reshape(*x.shape[:1], count, stride, *x.shape[2:])
        for at in range(0, length, stride)
    ]
    return jnp.concatenate(parts, axis=2).transpose(0, 1, 3, 2, 4)


def sees(
    q: Tokens, own_from: Int[Array, "B T"], k: Tokens, starts: Int[Array, "B E"]
) -> Bool[Array, "B T E"]:
    """True where a query sees a block or an entry.

    That is ``visible``, except for those parts of the prompt of which the query's branch has
    copies.
    """
    return visible(dataclasses.replace(q, limits=own_from), dataclasses.replace(k, limits=starts))


def best_blocks(ranked: Float[Array, "B T P J"], picks: int) -> Int[Array, "B T P n"]:
    """Numbers of the ``picks`` highest blocks, -1 for any at -inf; ties go to the lower number.

    A block at NaN is among the highest: the query that should choose reads it, and shows it.
    """
    count = min(picks, ranked.shape[-1])
    ranked = jnp.where(jnp.isnan(ranked), jnp.inf, ranked)
    best, found = jax.lax.top_k(ranked, count)
    found = jnp.where(best == -jnp.inf, -1, found).astype(jnp.int32)
    return jnp.pad(found, ((0, 0),) * 3 + ((0, picks - count),), constant_values=-1)


def map_queries(step, chunk: int, *xs):
    """Runs ``step`` on chunks of axis 1 of the arrays in ``xs``, one chunk after another.

    Returns the results joined along axis 1. The last chunk is filled up with zeros, whose results
    are dropped.
    """
    length = jax.tree.leaves(xs)[0].shape[1]
    if chunk >= length:
        return step(xs)

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, -length % chunk)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

    return jax.tree.map(join, jax.lax.map(step, jax.tree.map(cut, xs)))
