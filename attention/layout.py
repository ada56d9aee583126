"""Layout of rows of tokens, as attention sees them: computed once for all layers of a model.

Dimensions: B rows, T queries, S keys or their places, N query heads, K key/value heads, H head
size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention.blocks import Blocks, aligned, in_place
from attention.blockwise import SHORT, blockwise_or_kernel
from attention.keys import Keys, Pair
from attention.ring import Ring
from attention.selected import selected_attention
from pallas_kernels import choice
from pallas_kernels.softmax import masked_attention
from pallas_kernels.tokens import Tokens, visible


class MethodOfRows(Protocol):
    """The part of a method of attention that rows ask (``methods.method.Method``)."""

    @property
    def mixes(self) -> bool:
        """As ``Method.mixes``."""

    @property
    def keeps_state(self) -> bool:
        """As ``Method.keeps_state``."""

    def windows(self) -> tuple[int | None, ...]:
        """As ``Method.windows``."""

    def block_size(self) -> int | None:
        """As ``Method.block_size``."""

    def prepare(self, layout: Layout) -> Any:
        """As ``Method.prepare``."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows of tokens as the layers see them. The first axis of every array is that of the rows.

    Where the tokens of rows are cut over devices (``ring``), a device has its own part of the
    queries, and of keys those branches that its method names (``Method.cut_keys``). Everything else
    here is of whole rows.
    """

    # The tokens of the keys, [B, S].
    tokens: Tokens
    # The tokens of the queries, which are the last T of the S.
    queries: Tokens
    # From a window (0 for none) to the mask of who sees whom. Only on CPU and for rows that are
    # short enough for ``masked_attention``; empty otherwise.
    masks: dict[int, Bool[Array, "B T S"]]
    # From the size of a block to the rows cut into such blocks.
    blocks: dict[int, Blocks]
    # What ``Method.prepare`` gave for each of ``methods``.
    prepared: tuple[Any, ...]
    # The different methods of the model's layers.
    methods: tuple[MethodOfRows, ...] = dataclasses.field(metadata=dict(static=True))
    # The devices over which the tokens of rows are cut; None where every device has whole rows.
    ring: Ring | None = dataclasses.field(default=None, metadata=dict(static=True))
    # The most runs of one segment and branch in a row; 0 where each row holds one sequence.
    runs: int = dataclasses.field(default=0, metadata=dict(static=True))
    # The number of which the first slot of every sequence is a multiple, see ``lay_out``.
    align: int = dataclasses.field(default=1, metadata=dict(static=True))
    # Over how many devices the tokens of rows are cut, or will be.
    parts: int = dataclasses.field(default=1, metadata=dict(static=True))

    def cut(self, ring: Ring | None) -> Layout:
        """The layout with this device's part of the queries, from inside a ``shard_map``."""
        if ring is None:
            return self
        queries, own_from = jax.tree.map(
            ring.mine, (self.queries, {size: x.own_from for size, x in self.blocks.items()})
        )
        blocks = {
            size: dataclasses.replace(found, own_from=own_from[size], causal=False)
            for size, found in self.blocks.items()
        }
        return dataclasses.replace(self, queries=queries, blocks=blocks, ring=ring)

    def prepared_for(self, method: MethodOfRows) -> Any:
        """The result of ``Method.prepare`` for a method."""
        return self.prepared[self.methods.index(method)]

    def attend(
        self, q: Float[Array, "B T N H"], keys: Pair, window: int | None = None
    ) -> Float[Array, "B T N H"]:
        """Attention to every key that a token may see, perhaps in a window.

        keys: of whole rows, or this device's part of them.
        """
        return self.attend_lse(q, keys, window)[0]

    def attend_lse(
        self, q: Float[Array, "B T N H"], keys: Pair, window: int | None = None
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
        """``attend``, and the log-sum-exp of the logits, float32."""
        if self.masks:
            return masked_attention(q, *keys, self.masks[window or 0])
        return self.attend_as(q, keys, self.queries, self.tokens, window)

    def attend_as(
        self,
        q: Float[Array, "B T N H"],
        keys: Pair,
        queries: Tokens,
        tokens: Tokens,
        window: int | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
        """(out, lse) of attention in which other tokens say who sees whom.

        queries: in place of ``self.queries``. tokens: those of keys, of whole rows.
        """
        if self.ring is None or keys[0].shape[1] == tokens.shape[1]:
            return blockwise_or_kernel(q, *keys, queries, tokens, window)
        part = functools.partial(_attend_part, self.ring, window)
        return self.ring.attend(part, q, *keys, (queries, tokens))

    def attend_chosen(
        self, q: Float[Array, "B T N H"], keys: Pair, picks: Int[Array, "B T P n"], size: int
    ) -> Float[Array, "B T N H"]:
        """Attention to chosen blocks.

        keys: in their places, from ``place``. picks: numbers of blocks of ``size`` places of whole
        rows, -1 for none.
        """
        orders = self.queries.order, self.blocks[size].order
        if self.ring is None:
            return selected_attention(q, *keys, picks, *orders, size=size)[0]
        part = functools.partial(_attend_part_of_chosen, self.ring, size)
        return self.ring.attend(part, q, *keys, (picks, *orders))[0]

    def place(self, size: int, x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B S *rest"]:
        """Keys or values in the places of blocks of ``size``: of whole rows, or those of them that
        this device has.
        """
        blocks = self.blocks[size]
        if self.ring is None:
            return blocks.place(x)
        slots = blocks.slots
        if slots is None:
            slots = jnp.broadcast_to(jnp.arange(blocks.tokens.shape[1]), blocks.tokens.shape)
        slots = jnp.where(blocks.tokens.segments > 0, slots, -1)
        return self.ring.take(x, self.ring.mine(slots))

    def mine(self, x: Shaped[Array, "B S *rest"]) -> Shaped[Array, "B S *rest"]:
        """The part of an array of whole rows that this device has."""
        return x if self.ring is None else self.ring.mine(x)

    def whole(self, x: Shaped[Array, "B S *rest"]) -> Shaped[Array, "B S *rest"]:
        """The parts of all devices side by side."""
        return x if self.ring is None else self.ring.whole(x)


def _attend_part(ring: Ring, window, q, k, v, number, queries: Tokens, tokens: Tokens):
    tokens = tokens.map(lambda x: ring.part(x, number))
    return blockwise_or_kernel(q, k, v, queries, tokens, window)


def _attend_part_of_chosen(ring: Ring, size: int, q, k, v, number, picks, q_order, k_order):
    count = k.shape[1] // size
    picks = picks - number * count
    picks = jnp.where((picks >= 0) & (picks < count), picks, -1)
    return selected_attention(q, k, v, picks, q_order, ring.part(k_order, number), size=size)


def lay_out(
    methods: Sequence[MethodOfRows],
    tokens: Tokens,
    runs: int = 0,
    queries: int | None = None,
    *,
    align: int = 1,
    documents: bool = False,
    parts: int = 1,
) -> Layout:
    """The layout of rows for layers of these methods.

    A method that chooses blocks of keys must know where the blocks of a sequence begin. Either
    ``runs`` or ``align`` says so. Other methods need neither.

    runs: the most runs of one segment and branch in a row, which may start at any slot (see
      ``aligned``); 0 if nobody has counted them.
    queries: how many of the last tokens attend; None for all.
    align: for rows without branches, a number of which the first slot of every sequence and
      document is a multiple. It must be a multiple of the blocks' size. 0, a multiple of every
      number, for rows that hold one sequence from slot 0.
    documents: with ``runs``, whether documents may cut the runs (see ``aligned``).
    parts: over how many devices the tokens of a row will be cut (``Layout.cut``), equally.

    Raises:
      ValueError: a method chooses blocks, ``runs`` is less than 1, and ``align`` is not a multiple
      of the blocks' size; or the tokens of a row, or ``queries``, do not divide by ``parts``.
    """
    for count in (tokens.shape[1], queries or 0):
        if count % parts:
            raise ValueError(
                f"rows of {count} tokens cannot be cut over context={parts} devices: their number "
                f"must be a multiple of it"
            )
    methods = tuple(dict.fromkeys(methods))
    _check_states(methods, runs, align, queries, documents)
    asking = tokens if queries is None else tokens.map(lambda x: x[:, -queries:])
    # an accelerator has a kernel for short rows too, which keeps no scores in memory
    short = choice.here() == "cpu" and tokens.shape[1] <= SHORT and parts == 1
    windows = sorted({window or 0 for method in methods for window in method.windows()})
    masks = {window: visible(asking, tokens, window or None) for window in windows if short}
    sizes = sorted({method.block_size() for method in methods if method.block_size()})
    # blocks cut from another slot than a sequence's first would hold tokens of two sequences
    if runs < 1 and any(align % size for size in sizes):
        raise ValueError(
            f"{runs=} must be at least 1: {methods=} choose blocks, which packed rows align run by "
            f"run; or {align=} must be a multiple of the blocks' {sizes=}"
        )

    def cut(size: int) -> Blocks:
        if runs < 1:
            found = in_place(tokens, size, parts)
        else:
            found = aligned(tokens, size, runs, documents, parts)
        if queries is None:
            return found
        # the queries do not lie in the places from the first one on
        return dataclasses.replace(found, own_from=found.own_from[:, -queries:], causal=False)

    # ``prepare`` reads the rest of the layout, so its results are put in afterwards
    blocks = {size: cut(size) for size in sizes}
    # without branches a run, or the padding behind one, begins at no more places than these
    most = runs if runs > 0 or align == 0 else 2 * -(-tokens.shape[1] // align)
    given = dict(runs=most, align=align, parts=parts)
    layout = Layout(tokens, asking, masks, blocks, (), methods, **given)
    return dataclasses.replace(layout, prepared=tuple(method.prepare(layout) for method in methods))


def _check_states(
    methods: Sequence[MethodOfRows],
    runs: int,
    align: int,
    queries: int | None,
    documents: bool,
) -> None:
    """Raises ValueError for rows that a method with a state, or with projections of its own, cannot
    compute; arguments of ``lay_out``.
    """
    own = [method for method in methods if method.mixes]
    if queries is not None and own:
        raise ValueError(f"{own[0]} cannot continue tokens computed before, which it does not get")
    states = [method for method in own if method.keeps_state]
    if not states:
        return
    if runs < 1 and align == 1:
        raise ValueError(
            f"{runs=} must be at least 1: {states[0]} begins a state with every run of packed rows"
        )
    if documents:
        raise ValueError(f"{states[0]} has a state, and no document could be computed alone")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Before:
    """Tokens that stand before those of every row, and the keys that layers keep of them."""

    # [B, P].
    tokens: Tokens
    # The positions that RoPE rotates by.
    positions: Int[Array, "B P"]
    # For each entry of the model's ``attention`` the keys of its layers, [layers, B, P, K, H] each,
    # neither rotated nor derived.
    keys: list[Keys]
