"""How rows of tokens lie, as attention sees them: computed once for all layers of a model.

Dimensions: B rows, T queries, S keys or their places, N query heads, K key/value heads, H head
size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from attention.blocks import Blocks, aligned, in_place
from attention.blockwise import SHORT, blockwise_or_kernel
from attention.methods.method import Keys, Method, Pair
from pallas_kernels import choice
from pallas_kernels.softmax import masked_attention
from pallas_kernels.tokens import Tokens, visible


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows of tokens as the layers see them. The first axis of every array is that of the rows."""

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
    methods: tuple[Method, ...] = dataclasses.field(metadata=dict(static=True))

    def prepared_for(self, method: Method) -> Any:
        """What ``Method.prepare`` gave for a method."""
        return self.prepared[self.methods.index(method)]

    def attend(
        self, q: Float[Array, "B T N H"], keys: Pair, window: int | None = None
    ) -> Float[Array, "B T N H"]:
        """Attention to every key that a token may see, perhaps in a window."""
        if self.masks:
            return masked_attention(q, *keys, self.masks[window or 0])[0]
        return blockwise_or_kernel(q, *keys, self.queries, self.tokens, window)[0]


def lay_out(
    methods: Sequence[Method],
    tokens: Tokens,
    runs: int = 0,
    queries: int | None = None,
    *,
    align: int = 1,
    documents: bool = False,
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

    Raises:
      ValueError: a method chooses blocks, ``runs`` is less than 1, and ``align`` is not a multiple
      of the blocks' size.
    """
    methods = tuple(dict.fromkeys(methods))
    asking = tokens if queries is None else tokens.map(lambda x: x[:, -queries:])
    # an accelerator has a kernel for short rows too, which keeps no scores in memory
    short = choice.here() == "cpu" and tokens.shape[1] <= SHORT
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
        found = in_place(tokens, size) if runs < 1 else aligned(tokens, size, runs, documents)
        if queries is None:
            return found
        # the queries do not lie in the places from the first one on
        return dataclasses.replace(found, own_from=found.own_from[:, -queries:], causal=False)

    # ``prepare`` reads the rest of the layout, so its results are put in afterwards
    layout = Layout(tokens, asking, masks, {size: cut(size) for size in sizes}, (), methods)
    return dataclasses.replace(layout, prepared=tuple(method.prepare(layout) for method in methods))


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
