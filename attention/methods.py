"""One call for every attention method: what a layer needs of its rows (``View``), and ``attend``.

Dimensions: B rows, T tokens, S places of keys, E stretches, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.blocks import Blocks, Entries, aligned, entries, in_place
from attention.dense import DIRECT, dense_attention
from attention.moba import MoBA, moba_attention
from attention.nsa import NSA, nsa_attention
from attention.squid import GatedDocuments, gated_documents
from pallas_kernels.softmax import masked_attention
from pallas_kernels.tokens import Tokens, visible


@dataclasses.dataclass(frozen=True)
class Dense:
    """Every key that a token may see."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The last ``window`` keys, the token's own counted."""

    window: int

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"Window: window={self.window} must be at least 1")


Method = Dense | Window | MoBA | NSA | GatedDocuments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """Rows of tokens as the layers see them, computed once for all of them.

    masks: who sees whom, by the window (0 for none), of rows short enough for ``masked_attention``. blocks: the rows
    cut into blocks, by their size. stretches: those that an NSA layer compresses.
    """

    tokens: Tokens
    masks: dict[int, Bool[Array, "B T T"]]
    blocks: dict[int, Blocks]
    stretches: dict[NSA, Entries]


def view(methods: Sequence[Method], tokens: Tokens, runs: int | None = None) -> View:
    """The view of rows by layers of these methods.

    runs: None when every sequence and document starts at a slot that is a multiple of the blocks' size; else the most
    runs of one segment, branch and document in a row (see ``aligned``).
    """
    windows = {0 for method in methods if isinstance(method, Dense)}
    windows |= {method.window for method in methods if isinstance(method, Window | NSA)}
    short = tokens.shape[1] <= DIRECT
    masks = {window: visible(tokens, tokens, window or None) for window in sorted(windows) if short}
    sizes = sorted({method.block for method in methods if isinstance(method, NSA | MoBA)})
    blocks = {size: in_place(tokens, size) if runs is None else aligned(tokens, size, runs) for size in sizes}
    sparse = {method for method in methods if isinstance(method, NSA)}
    stretches = {method: entries(blocks[method.block], method.length, method.stride) for method in sparse}
    return View(tokens, masks, blocks, stretches)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """Keys and values of a layer, (k, v) each.

    main: [B, T, K, H], all there is but for NSA, where they are those of the selected branch. compressed: [B, E, K, H];
    window: [B, T, K, H].
    """

    main: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]
    compressed: tuple[Float[Array, "B E K H"], Float[Array, "B E K H"]] | None = None
    window: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]] | None = None


def attend(
    method: Method,
    q: Float[Array, "B T N H"],
    keys: KeyValues,
    view: View,
    gates: Float[Array, "B T N parts"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of the rows to themselves by a method.

    gates: of the parts that NSA (3) and GatedDocuments (2) add up, after the sigmoid.
    """
    tokens = view.tokens
    if isinstance(method, Dense):
        return _all_keys(q, keys.main, view, 0)
    if isinstance(method, Window):
        return _all_keys(q, keys.main, view, method.window)
    if isinstance(method, GatedDocuments):
        return gated_documents(q, *keys.main, tokens, tokens, gates)
    blocks = view.blocks[method.block]
    main = tuple(blocks.place(x) for x in keys.main)
    if isinstance(method, MoBA):
        return moba_attention(q, *main, tokens, blocks, method)[0]
    window = _all_keys(q, keys.window, view, method.window)
    return nsa_attention(q, keys.compressed, main, window, gates, tokens, blocks, view.stretches[method], method)


def _all_keys(q, keys, view: View, window: int):
    """Attention to every key of the window, or to all where it is 0."""
    if view.masks:
        return masked_attention(q, *keys, view.masks[window])[0]
    return dense_attention(q, *keys, view.tokens, view.tokens, window=window or None)[0]


def stretch_positions(method: NSA, positions: Int[Array, "B T"], view: View) -> Int[Array, "B E"]:
    """The position of every stretch's last token, by which its compressed key is rotated."""
    return view.blocks[method.block].last(positions, method.length, method.stride)


def decode_bytes(method: Method, tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of keys and values that a layer reads to decode the token after ``tokens`` - 1 others, at most.

    The 2502.11089 paper's measure of decoding (table 4). MoBA reads its blocks' means in float32, and a block once for
    every query head that chose it, but none more often than there are key/value heads.
    """
    pair = 2 * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize
    if isinstance(method, Dense | GatedDocuments):
        return tokens * pair
    if isinstance(method, Window):
        return min(tokens, method.window) * pair
    blocks = -(-tokens // method.block)
    if isinstance(method, MoBA):
        lists = min(num_heads * min(method.picks, blocks), num_kv_heads * blocks)
        return blocks * num_kv_heads * head_dim * 4 + min(lists * method.block * pair // num_kv_heads, tokens * pair)
    stretches = max(0, (tokens - method.length) // method.stride + 1)
    return (stretches + min(tokens, method.picks * method.block) + min(tokens, method.window)) * pair
