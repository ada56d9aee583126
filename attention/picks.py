"""The blocks that a sampler chose, beside those that the trainer chooses or in their place.

A method that chooses blocks ranks them by scores. Where two scores are nearly equal, a sampler in
bfloat16, or with other kernels, may take another block than the trainer. The log-probabilities of
the two then differ by more than rounding. The sampler can therefore note what it chose. The trainer
compares that with its own choice, or attends to the noted blocks instead (``rollout.picks``).

A noted block is a number by order: block j holds the places [j size, (j + 1) size) of its context.
An indexer (``attention.indexer``) chooses single tokens, which are blocks of one here.
The packed rows of the trainer have their blocks elsewhere (``attention.blocks``): a prompt stands
once for all that continue it, and a completion has copies of its end.

Dimensions: B rows, S slots, T queries, M noted queries, K key/value heads, J blocks, L layers that
choose, n picks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from attention.blocks import Blocks
from attention.keys import Keys
from attention.layout import Layout
from attention.methods.method import Method
from attention.ring import Ring

_MOST = jnp.iinfo(jnp.int32).max


def choosing(methods: Sequence[Method]) -> int | None:
    """The most blocks that a list of noted picks has; None where no layer's picks can be noted."""
    return max((method.noted_picks() or 0 for method in methods), default=0) or None


def noted_shape(methods: Sequence[Method], num_kv_heads: int) -> tuple[int, int, int]:
    """The shape of the picks of one token: (layers that choose, lists of each, picks of a list).

    methods: those of every layer, of which some choose. Raises ValueError where they have different
    numbers of lists.
    """
    choose = [method for method in methods if method.noted_picks() is not None]
    lists = {method.pick_lists(num_kv_heads) for method in choose}
    if len(lists) > 1:
        raise ValueError(
            f"picks cannot be noted of layers that choose by {sorted(lists)} lists: "
            f"{', '.join(map(str, dict.fromkeys(choose)))}"
        )
    return len(choose), lists.pop(), max(method.noted_picks() or 0 for method in choose)


def noted_dtype(methods: Sequence[Method], tokens: int) -> np.dtype:
    """The dtype of the picks in a context of so many tokens."""
    sizes = [method.pick_size() or 1 for method in methods if method.noted_picks() is not None]
    return narrowest(tokens // min(sizes))


def narrowest(blocks: int) -> np.dtype:
    """The smallest unsigned integer for the numbers of so many blocks and one for "none"."""
    return np.min_scalar_type(blocks)


def compact(picks: Int[Array, "*rest n"], most: int, dtype: np.dtype) -> UInt[Array, "*rest most"]:
    """Picks as they are noted: the greatest number of ``dtype`` stands for none (-1)."""
    none = jnp.iinfo(dtype).max
    picks = jnp.where(picks < 0, none, picks).astype(dtype)
    missing = [(0, 0)] * (picks.ndim - 1) + [(0, most - picks.shape[-1])]
    return jnp.pad(picks, missing, constant_values=none)


def numbers(noted: UInt[Array, "*rest n"]) -> Int[Array, "*rest n"]:
    """The opposite of ``compact``."""
    none = jnp.iinfo(noted.dtype).max
    return jnp.where(noted == none, -1, noted.astype(jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noted:
    """The choices of a sampler for some queries of packed rows, in all layers that choose."""

    # Blocks as ``compact`` makes them; none at all for a query of which nothing was noted. None for
    # a model without layers that choose blocks.
    picks: UInt[Array, "B M L K n"] | None
    # The slots of the queries. No two queries of which something was noted have the same slot.
    sources: Int[Array, "B M"]
    # Whether layers attend to these blocks. False: they attend to their own choice, which is only
    # compared with these.
    replay: bool = dataclasses.field(metadata=dict(static=True))
    # In the same way the experts of every layer that has any; None for a model without experts.
    experts: UInt[Array, "B M L k"] | None = None

    def by_layer(self, methods: Sequence[Method]) -> list[jax.Array | None]:
        """For each method of a period its layers' picks [periods, B, M, K, n]; None for a method
        whose picks are not noted.
        """
        choose = [method.noted_picks() for method in methods]
        per_period = sum(count is not None for count in choose)
        if self.picks is None:
            return [None] * len(choose)
        picks = jnp.moveaxis(self.picks, 2, 0)
        found: list[jax.Array | None] = []
        at = 0
        for count in choose:
            found.append(None if count is None else picks[at::per_period, ..., :count])
            at += count is not None
        return found


def attend_noted(
    method: Method,
    q: Float[Array, "B T N H"],
    keys: Keys,
    layout: Layout,
    inputs: Float[Array, "B T N parts"] | None,
    picks: UInt[Array, "B M K n"],
    sources: Int[Array, "B M"],
    replay: bool,
    ring: Ring | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B M K 2"]]:
    """``Method.attend`` of a layer whose sampler noted its picks, and how the two choices agree.

    layout: of whole rows. ring: the devices over which the tokens of rows are cut; q and the keys
    are then this device's part, and the picks those of whole rows.

    Returns (the result; for each list of a noted query the share of its picks that the layer's own
    choice has too, and whether both are the same set, 1 or 0). Both are 0 where nothing was noted.
    """
    cut = layout.cut(ring)
    found, own = method.choose(q, keys, cut)
    blocks = layout.blocks[method.block_size()]
    given = placed(layout, blocks, sources, numbers(picks))
    count = own.shape[1]
    first = 0 if ring is None else jax.lax.axis_index(ring.axis) * count
    at = sources - first
    here = (at >= 0) & (at < count)
    mine = jnp.take_along_axis(own, jnp.clip(at, 0, count - 1)[..., None, None], axis=1)
    shares = jnp.where(here[..., None, None], agreement(mine, given), 0.0)
    if ring is not None:
        shares = jax.lax.psum(shares, ring.axis)
    if replay:
        # past the last slot, where nothing is written
        nothing = jnp.all(given < 0, axis=(2, 3)) | ~here
        at = jnp.where(nothing, count, at)
        own = own.at[jnp.arange(own.shape[0])[:, None], at].set(given, mode="drop")
    return method.attend_chosen_blocks(q, keys, cut, inputs, found, own), shares


def agreement(own: Int[Array, "B M K n"], given: Int[Array, "B M K n"]) -> Float[Array, "B M K 2"]:
    """(The share of the given picks that are among a query's own, whether both are the same set).

    Picks are numbers of blocks, each at most once, -1 for none. 0 where none are given.
    """
    real = given >= 0
    count = jnp.sum(real, axis=-1)
    shared = jnp.sum(real & jnp.any(given[..., None] == own[..., None, :], axis=-1), axis=-1)
    equal = (shared == count) & (jnp.sum(own >= 0, axis=-1) == count) & (count > 0)
    found = jnp.stack([shared / jnp.maximum(count, 1), equal], axis=-1)
    return jax.lax.stop_gradient(found.astype(jnp.float32))


def placed(
    layout: Layout, blocks: Blocks, sources: Int[Array, "B M"], wanted: Int[Array, "B M K n"]
) -> Int[Array, "B M K n"]:
    """Blocks by order as those blocks of packed rows that the queries at ``sources`` see; -1 for
    none, and for a block that a query does not see.
    """
    find = jax.vmap(lambda *row: _placed(*row, size=blocks.size))
    home = jnp.take_along_axis(_homes(layout, blocks), sources, axis=1)
    own_from = jnp.take_along_axis(blocks.own_from, sources, axis=1)
    heads = blocks.heads
    return find(heads.segments, heads.branches, heads.order, home, own_from, wanted)


def _placed(segments, branches, order, home, own_from, wanted, *, size: int):
    """One row of ``placed``: heads of blocks [J]; home and own_from [M]; wanted [M, K, n]."""
    count = segments.shape[0]
    # Blocks lie in the order of segments and branches, and within a branch in their own order. So
    # (number of the branch in the row, number of the block by order) rises from block to block, and
    # a block is found by bisection.
    starts = segments != jnp.roll(segments, 1)
    starts = starts.at[0].set(True)
    branch = jnp.cumsum(starts | (branches != jnp.roll(branches, 1)))
    root = jax.lax.cummax(jnp.where(starts, branch, 0))
    # No context has as many blocks as the row has, and one more.
    key = jnp.where(segments > 0, branch * (count + 1) + order // size, _MOST)
    home = home[:, None, None]
    own = wanted * size >= own_from[:, None, None]
    at_key = jnp.where(own, branch[home], root[home]) * (count + 1) + wanted
    at = jnp.minimum(jnp.searchsorted(key, at_key), count - 1)
    seen = (wanted >= 0) & (wanted <= count) & (key[at] == at_key)
    return jnp.where(seen, at, -1)


def _homes(layout: Layout, blocks: Blocks) -> Int[Array, "B T"]:
    """For every slot the block that holds it, and not a copy of it; any for an empty slot."""
    count = layout.tokens.shape[1]
    if blocks.slots is None:
        return jnp.broadcast_to(jnp.arange(count) // blocks.size, layout.tokens.shape)

    def row(slots, branches, of_slots):
        original = (slots >= 0) & (branches == of_slots[slots])
        index = jnp.arange(slots.shape[0]) // blocks.size
        homes = jnp.zeros(count, index.dtype)
        return homes.at[jnp.where(original, slots, count)].set(index, mode="drop")

    return jax.vmap(row)(blocks.slots, blocks.tokens.branches, layout.tokens.branches)
