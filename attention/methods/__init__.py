"""One call for every attention method: what a layer needs of its rows (``View``), and ``attend``.

Dimensions: B rows, T queries, S keys or their places, E stretches, N query heads, K key/value
heads, H head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.blocks import Blocks, Entries, aligned, entries, in_place
from attention.blockwise import block_size, blockwise_attention
from attention.dense import DIRECT
from attention.moba import MoBA, moba_attention
from attention.nsa import NSA, nsa_attention
from attention.squid import GatedDocuments, gated_documents
from pallas_kernels.flash.api import flash_attention
from pallas_kernels.softmax import masked_attention
from pallas_kernels.tokens import Tokens, visible

# Rows of at most this many keys are faster on CPU with all their scores in memory than in blocks.
SHORT = 128


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

# Name in a config -> method; its fields are the method's settings.
METHODS = {
    "dense": Dense,
    "window": Window,
    "moba": MoBA,
    "nsa": NSA,
    "squid": GatedDocuments,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """Rows of tokens as the layers see them, computed once for all of them.

    tokens: of the keys. queries: of the queries, which are the last T of the S. masks: who sees
    whom, by the window (0 for none), of rows short enough for ``masked_attention``. blocks: the
    rows cut into blocks, by their size. stretches: those that an NSA layer compresses.
    """

    tokens: Tokens
    queries: Tokens
    masks: dict[int, Bool[Array, "B T S"]]
    blocks: dict[int, Blocks]
    stretches: dict[NSA, Entries]


def view(
    methods: Sequence[Method], tokens: Tokens, runs: int | None = None, queries: int | None = None
) -> View:
    """The view of rows by layers of these methods.

    runs: None when every sequence and document starts at a slot that is a multiple of the blocks'
    size; else the most runs of one segment, branch and document in a row (see ``aligned``).
    queries: how many of the last tokens attend, None for all.

    Raises:
      ValueError: ``runs`` is less than 1 and a method cuts the rows into blocks.
    """
    asking = tokens if queries is None else tokens.map(lambda x: x[:, -queries:])
    windows = {0 for method in methods if isinstance(method, Dense)}
    windows |= {method.window for method in methods if isinstance(method, Window | NSA)}
    short = tokens.shape[1] <= (SHORT if jax.default_backend() == "cpu" else DIRECT)
    masks = {window: visible(asking, tokens, window or None) for window in sorted(windows) if short}
    sizes = sorted({method.block for method in methods if isinstance(method, NSA | MoBA)})
    if sizes and runs is not None and runs < 1:
        raise ValueError(
            f"{runs=} must be at least 1: {methods=} choose blocks, which packed rows align run by "
            "run"
        )

    def cut(size: int) -> Blocks:
        found = in_place(tokens, size) if runs is None else aligned(tokens, size, runs)
        if queries is None:
            return found
        return dataclasses.replace(found, own_from=found.own_from[:, -queries:], causal=False)

    blocks = {size: cut(size) for size in sizes}
    sparse = {method for method in methods if isinstance(method, NSA)}
    stretches = {
        method: entries(blocks[method.block], method.length, method.stride) for method in sparse
    }
    return View(tokens, asking, masks, blocks, stretches)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """Keys and values of a layer, (k, v) each.

    main: [B, S, K, H], all there is but for NSA, where they are those of the selected branch.
    compressed: [B, E, K, H]; window: [B, S, K, H]. raw: [B, S, K, H], what is compressed; no
    attention reads it.
    """

    main: tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]
    compressed: tuple[Float[Array, "B E K H"], Float[Array, "B E K H"]] | None = None
    window: tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]] | None = None
    raw: tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Before:
    """Tokens that stand before those of every row, [B, P], and what layers keep of them.

    positions: those that RoPE rotates by. keys: neither rotated nor compressed, per method of the
    model's ``attention`` those of its layers, [layers, B, P, K, H] each.
    """

    tokens: Tokens
    positions: Int[Array, "B P"]
    keys: list[KeyValues]


def attend(
    method: Method,
    q: Float[Array, "B T N H"],
    keys: KeyValues,
    view: View,
    gates: Float[Array, "B T N parts"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of the rows' queries by a method.

    gates: of the parts that NSA (3) and GatedDocuments (2) add up, after the sigmoid.
    """
    tokens = view.queries
    if isinstance(method, Dense):
        return _all_keys(q, keys.main, view, 0)
    if isinstance(method, Window):
        return _all_keys(q, keys.main, view, method.window)
    if isinstance(method, GatedDocuments):
        return gated_documents(q, *keys.main, tokens, view.tokens, gates)
    blocks = view.blocks[method.block]
    main = tuple(blocks.place(x) for x in keys.main)
    if isinstance(method, MoBA):
        return moba_attention(q, *main, tokens, blocks, method)[0]
    window = _all_keys(q, keys.window, view, method.window)
    return nsa_attention(
        q, keys.compressed, main, window, gates, tokens, blocks, view.stretches[method], method
    )


def _all_keys(q, keys, view: View, window: int):
    """Attention to every key of the window, or to all where it is 0."""
    if view.masks:
        return masked_attention(q, *keys, view.masks[window])[0]
    tokens = (view.queries, view.tokens)
    span = window or None

    def in_blocks():
        return blockwise_attention(q, *keys, *tokens, span, block_size(keys[0].shape[1], span))

    return flash_attention(q, *keys, *tokens, window=span, fallback=in_blocks)[0]


def stretch_positions(method: NSA, positions: Int[Array, "B S"], view: View) -> Int[Array, "B E"]:
    """The position of every stretch's last token, by which its compressed key is rotated."""
    return view.blocks[method.block].last(positions, method.length, method.stride)


def decode_bytes(
    method: Method, tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str
) -> int:
    """Bytes of keys and values that a layer reads to decode the token after ``tokens`` - 1 others,
    at most.

    The 2502.11089 paper's measure of decoding (table 4). MoBA reads its blocks' means in float32,
    and a block once for every query head that chose it, but none more often than there are
    key/value heads.
    """
    pair = 2 * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize
    if isinstance(method, Dense | GatedDocuments):
        return tokens * pair
    if isinstance(method, Window):
        return min(tokens, method.window) * pair
    blocks = -(-tokens // method.block)
    if isinstance(method, MoBA):
        lists = min(num_heads * min(method.picks, blocks), num_kv_heads * blocks)
        return blocks * num_kv_heads * head_dim * 4 + min(
            lists * method.block * pair // num_kv_heads, tokens * pair
        )
    stretches = max(0, (tokens - method.length) // method.stride + 1)
    return (
        stretches + min(tokens, method.picks * method.block) + min(tokens, method.window)
    ) * pair
