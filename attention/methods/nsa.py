"""Native sparse attention (DeepSeek, 2502.11089): compressed, selected and sliding-window keys,
gated.

    o = sum over c in {compressed, selected, window} of sigmoid(g_c(x)) * Attn(q, K_c, V_c)

Each branch has keys and values of its own.

- Compressed: one key and one value of each stretch of ``length`` tokens, their mean and what an MLP
  adds to it. A stretch starts every ``stride`` tokens.
- Selected: the query attends to the best ``picks`` blocks of ``block`` tokens. The first and the
  latest blocks are always among them. The softmax over compressed keys ranks the others: a block's
  score sums it over the query heads of a group, and over the stretches that share tokens with the
  block, each times what they share.
- Window: the query attends to the last ``window`` keys.

Departures from the paper, where it is silent or ambiguous:
- An MLP alone has to learn first that a compressed key stands for its keys; until then the choice
  of blocks is random, and what is not chosen teaches nothing. So it begins as little more than a
  mean (docs/results/long_context.md has both).
- A stretch belongs to the blocks by the tokens they share (equation 9 read with indices from 1).
- Compressed keys are made of keys that are not rotated, and then rotated as the last token of their
  stretch. The compressed keys of a document, before rotation, do not depend on its place.
- A query that sees no stretch gets 0 from that branch.

Dimensions: B rows, T queries, S places of keys, E stretches, J blocks, N query heads, K key/value
heads, G = N / K, H head size, F hidden size of the MLP, l length.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.blocks import Blocks, Entries, entries, stretches
from attention.blockwise import XLA, check_heads
from attention.cache.reader import FEW, PageReader
from attention.cache.writer import PageWriter
from attention.calls import Call, CallShape, chosen_calls, compressed_calls, paged_call, rows_calls
from attention.compressed import compressed_attention, from_pages
from attention.keys import Keys, Pair
from attention.methods.method import (
    LayerPages,
    LayerShape,
    Method,
    PageShape,
    Parameter,
    Parameters,
    shape_bytes,
)
from attention.products import project
from attention.query_cost import BLOCK, QueryCost, chosen, gathered, windowed
from attention.selected import selected_attention
from pallas_kernels.compressed.blocks import Selection
from pallas_kernels.finite import cleaned, marked
from pallas_kernels.paged.reference import NO_PAGE, put
from pallas_kernels.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class NSA(Selection, Method):
    """The settings of the paper (section 4.1): those of ``Selection``, and the window.

    It has four sets of keys and values. "main", the layer's own, are those of the selected branch.
    "raw" are the ones to be compressed, and "compressed" the result. "window" are those of the
    sliding window.
    """

    # Keys that a query sees in the sliding window, its own counted (w in the paper).
    window: int = 512

    def __post_init__(self):
        super().__post_init__()
        if self.block < self.length:
            raise ValueError(f"NSA: length={self.length} must not exceed block={self.block}")
        if self.local < 1:
            raise ValueError(f"NSA: local={self.local} must be at least 1")
        if self.window < 1:
            raise ValueError(f"NSA: window={self.window} must be at least 1")

    def block_size(self):
        return self.block

    def cut_keys(self):
        # compressed keys are few: every device has those of whole rows
        return ("main", "window")

    def noted_picks(self):
        return self.picks

    def windows(self):
        return (self.window,)

    # --- Parameters and keys -------------------------------------------------------------------

    def parameters(self, shape: LayerShape) -> dict[str, Parameter]:
        """Projections to the keys and values of the compressed and of the window branch, the MLPs
        that compress keys and values, and the gates.
        """
        embed = shape.embed_dim
        head = shape.head_dim
        length = self.length
        found = {}
        keys = Parameter(
            (embed, shape.num_kv_heads, head), ("embed", "kv_heads", "head_dim"), embed**-0.5
        )
        for name in ("compressed_k", "compressed_v", "window_k", "window_v"):
            found[name] = dataclasses.replace(keys, like=name[-1])
        # the MLP: a position vector is added to each token of a stretch, then two matrices
        for name in ("k", "v"):
            found[f"{name}_positions"] = Parameter((length, head), (None, "head_dim"), 0.02)
            found[f"{name}_first"] = Parameter(
                (length, head, head), (None, None, "head_dim"), (length * head) ** -0.5
            )
            # so small that a stretch begins as its mean
            found[f"{name}_second"] = Parameter((head, head), (None, "head_dim"), 0.02)
        gates = (embed, shape.num_heads, 3)
        found["gates"] = Parameter(gates, ("embed", "heads", None), embed**-0.5)
        return found

    def derives(self):
        return tuple(f"{name}_{part}" for name in "kv" for part in ("positions", "first", "second"))

    def new_keys(self, parameters, y, normalise) -> Keys:
        names = ("compressed_k", "compressed_v", "window_k", "window_v")
        ck, cv, wk, wv = (project(y, parameters[name].astype(y.dtype)) for name in names)
        return {"raw": (normalise(ck), cv), "window": (normalise(wk), wv)}

    def derived_keys(self, parameters, keys, layout) -> Keys:
        # a stretch must not mix runs, so the keys are first moved to the places of their blocks
        placed = (layout.place(self.block, x) for x in keys["raw"])
        if layout.ring is None:
            return {"compressed": self.compressed(parameters, *placed)}
        # the last stretches reach into the places of the next device
        reach = -(-self.length // self.stride) * self.stride - self.stride
        longer = (jnp.concatenate([x, layout.ring.after(x[:, :reach])], 1) for x in placed)
        found = self.compressed(parameters, *longer)
        return {"compressed": tuple(x[:, : x.shape[1] - reach // self.stride] for x in found)}

    def compressed(
        self, parameters: Parameters, k: Float[Array, "B S K H"], v: Float[Array, "B S K H"]
    ) -> Pair:
        """(k, v) [B, E, K, H] of the stretches, by the MLPs of one layer; keys are not rotated."""

        def one(x, name):
            mlp = (parameters[f"{name}_{part}"] for part in ("positions", "first", "second"))
            return compress(x, *mlp, self)

        return one(k, "k"), one(v, "v")

    def positions(self, positions, layout):
        """A compressed key is rotated as the last token of its stretch."""
        last = layout.blocks[self.block].last(positions, self.length, self.stride)
        return {"main": positions, "window": positions, "compressed": last}

    def head_inputs(self, parameters, y):
        """The gates of the three branches, after the sigmoid."""
        return jax.nn.sigmoid(project(y, parameters["gates"].astype(y.dtype)))

    # --- Attention over rows -------------------------------------------------------------------

    def prepare(self, layout) -> Entries:
        return entries(layout.blocks[self.block], self.length, self.stride)

    def attend(self, q, keys, layout, inputs):
        found, picks = self.choose(q, keys, layout)
        return self.attend_chosen_blocks(q, keys, layout, inputs, found, picks)

    def choose(self, q, keys, layout):
        blocks = layout.blocks[self.block]
        stretched = layout.prepared_for(self)
        found, _, picks = compressed_attention(
            q, *keys["compressed"], layout.queries, blocks, stretched, self
        )
        return found, picks

    def attend_chosen_blocks(self, q, keys, layout, inputs, found, picks):
        main = tuple(layout.place(self.block, x) for x in keys["main"])
        selected = layout.attend_chosen(q, main, picks, self.block)
        window = layout.attend(q, keys["window"], self.window)
        return gated(found, selected, window, inputs)

    # --- Pages of a cache ----------------------------------------------------------------------

    def pages(self, shape: PageShape) -> LayerPages:
        """Four pairs of arrays: "main" and "window" are [pages, K, page, H], and

        compressed: [pages, K, page / stride, H], of the stretches whose last token is in the page.
          What a page holds may depend on tokens before it but not after it. A compressed key
          therefore lies with the last token of its stretch, not with the first.
        recent: [pages, K, length, H], the page's last ``length`` raw keys and values, not rotated.
          They are needed only until the last stretch that they are part of is complete. They lie in
          a ring: the token at offset o of the page is at o modulo ``length``. The ring has more
          room where tokens may be taken back (``PageShape.undone``), so that these overwrite no key
          that is still needed.
        """
        return {
            "main": shape.pair(shape.page),
            "window": shape.pair(shape.page),
            "compressed": shape.pair(shape.page // self.stride),
            "recent": shape.pair(min(self.length + shape.undone, shape.page)),
        }

    def rotated_when_written(self) -> tuple[str, ...]:
        return ("main", "window")

    def write(self, pages, keys, at, parameters) -> LayerPages:
        return {
            "main": at.put(pages["main"], keys["main"]),
            "window": at.put(pages["window"], keys["window"]),
            "compressed": self._written_compressed(pages, keys["raw"], at, parameters),
            "recent": self._written_recent(pages["recent"], keys["raw"], at),
        }

    def _written_recent(self, ring: Pair, raw: Pair, at: PageWriter) -> Pair:
        """The rings with the new keys.

        A key that a later one of the same write would overwrite is not written: the order of writes
        to the same place in one scatter is not defined.
        """
        page, offset = at.where(at.places)
        room = ring[0].shape[2]
        later = (offset + room < at.page) & (at.places + room <= at.last)
        return put(ring, raw, jnp.where(later, NO_PAGE, page), offset % room)

    def _written_compressed(
        self, pages: LayerPages, raw: Pair, at: PageWriter, parameters: Parameters
    ) -> Pair:
        """The compressed keys and values with those of the stretches that the new tokens
        complete.
        """
        first = at.first
        length = self.length
        stride = self.stride
        count = at.places.shape[1]
        # Count the row in strides of tokens. These are the ones whose last token may be new, and at
        # the end of each a stretch may become complete.
        units = first // stride + jnp.arange((count + stride - 1) // stride)
        # The stretches that end with these strides reach back ``reach`` places before the first of
        # them. Of the places that they need, those before ``first`` come from the ring, and the
        # others are new.
        reach = length - stride
        needed = first // stride * stride - reach + jnp.arange(units.shape[1] * stride + reach)
        old, offset = at.where(jnp.where(needed >= first, -1, needed))
        # where each place is among the new tokens, and whether it is one of them
        index = needed - first
        fresh = jnp.broadcast_to((index >= 0) & (needed <= at.last), needed.shape)
        fresh = fresh[..., None, None]
        index = jnp.clip(index, 0, count - 1)[..., None, None]

        def gather(ring, new):
            kept = ring.at[old, :, offset % ring.shape[2]].get(mode="fill", fill_value=0)
            return jnp.where(fresh, jnp.take_along_axis(new, index, axis=1), kept.astype(new.dtype))

        both = zip(pages["recent"], raw, strict=True)
        keys = self.compressed(parameters, *(gather(ring, new) for ring, new in both))
        k, v = (x[:, : units.shape[1]] for x in keys)
        # the last place of each stretch; only stretches that are complete are written
        ends = (units + 1) * stride - 1
        k = at.rotate(k, at.positions(ends))
        complete = (ends <= at.last) & (ends >= length - 1) & at.one_run(ends, length)
        page, offset = at.where(jnp.where(complete, ends, -1))
        return put(pages["compressed"], (k, v), page, offset // stride)

    def attend_pages(self, pages, q, q_tokens, reader, inputs):
        # few queries read the chosen pages from where they lie; for many the rows are laid side by
        # side, as in training
        if q.shape[1] <= FEW:
            found, picks = self.choose_pages(pages, q, q_tokens, reader)
            return self.attend_chosen(pages, q, q_tokens, reader, inputs, found, picks)
        blocks = reader.blocks(q_tokens)
        window = reader.windowed(pages["window"], q, q_tokens, self.window)
        compressed, stretched = self._stretches(pages, blocks, reader)
        main = reader.rows(pages["main"])
        return nsa_attention(q, compressed, main, window, inputs, q_tokens, blocks, stretched, self)

    def choose_pages(self, pages, q, q_tokens, reader):
        """(the result of the compressed branch, the chosen pages); reads only compressed keys."""
        blocks = reader.blocks(q_tokens)
        few = q.shape[1] <= FEW
        table = reader.pages.tables
        # A kernel reads the pages where they lie. In rows with documents it takes one query:
        # several may be of different documents.
        documents = reader.pages.runs is not None
        if few and (q.shape[1] == 1 or not documents):
            stretched = self._entries(blocks) if documents else None
            found = from_pages(q, pages["compressed"], table, q_tokens, blocks, stretched, self)
            if found is not None:
                return found[0], found[2]
        compressed, stretched = self._stretches(pages, blocks, reader)
        # few queries would leave most of a tile of the other kernels empty, and XLA takes them in
        # one step
        implementation = XLA if few else None
        out, _, picks = compressed_attention(
            q, *compressed, q_tokens, blocks, stretched, self, implementation=implementation
        )
        return out, picks

    def attend_chosen(self, pages, q, q_tokens, reader, inputs, found, picks):
        selected = reader.chosen(pages["main"], q, q_tokens, picks)
        window = reader.windowed(pages["window"], q, q_tokens, self.window)
        return gated(found, selected, window, inputs)

    def _stretches(
        self, pages: LayerPages, blocks: Blocks, reader: PageReader
    ) -> tuple[Pair, Entries]:
        """((k, v), their stretches): the compressed keys and values of the rows' pages, [B, S /
        stride, K, H], in the order of the stretches' last tokens.
        """
        stretched = self._entries(blocks)
        k, v = (reader.joined(x, stretched.tokens) for x in pages["compressed"])
        return (k, v), stretched

    def _entries(self, blocks: Blocks) -> Entries:
        """The stretches of pages, which keep each with its last token."""
        late = self.length // self.stride - 1
        return entries(blocks, self.length, self.stride).by_last(late)

    # --- What it costs and how it runs ---------------------------------------------------------

    def decode_bytes(self, tokens: int, shape: LayerShape, dtype: str) -> int:
        found = max(0, (tokens - self.length) // self.stride + 1)
        selected = min(tokens, self.picks * self.block)
        return (found + selected + min(tokens, self.window)) * shape_bytes(shape, dtype)

    def branch_costs(
        self, shape: LayerShape, row: int, seen: float, decode: bool
    ) -> dict[str, QueryCost]:
        """``query_cost`` by branch. Gates are parameters that multiply hidden states."""
        size = shape.num_heads * self.pair_size(shape, decode)
        groups = shape.num_heads // shape.num_kv_heads
        window = windowed(seen, self.window, decode)
        picked = chosen(seen, row, self.block, self.picks, groups, decode)
        found = max(0.0, (seen - self.length) / self.stride + 1)
        # A block of queries ends in the middle of a block of compressed keys on average. A kernel
        # of its own computes the scores again to sum them over heads; a paged one keeps them.
        rest = 0.0 if decode else BLOCK / 2
        ranked = 0.0 if decode else (found + rest) * size / 2
        # A token's write computes every stretch that begins in the ring's ``length`` places.
        stretches = self.length / self.stride if decode else 1 / self.stride
        mlp = 2 * shape.num_kv_heads * (self.length + 1) * shape.head_dim**2
        return {
            "compressed": QueryCost(
                found * size, masked=rest * size, ranked=ranked, derived=stretches * mlp
            ),
            "selected": QueryCost(picked[0] * size, masked=picked[1] * size),
            "window": QueryCost(window[0] * size, masked=window[1] * size),
        }

    def query_cost(self, shape: LayerShape, row: int, seen: float, decode: bool) -> QueryCost:
        branches = self.branch_costs(shape, row, seen, decode).values()
        return QueryCost(*(sum(x) for x in zip(*branches, strict=True)))

    def gathered_elements(self, shape: LayerShape, row: int) -> int:
        return gathered(row, self.picks, shape.num_heads, shape.head_dim)

    def calls(self, shape: CallShape) -> tuple[Call, ...]:
        return (
            *compressed_calls("compressed", shape, self),
            *chosen_calls("selected", shape, shape.num_kv_heads, self.block, self.picks),
            paged_call("selected", shape),
            *rows_calls("window", shape),
            paged_call("window", shape),
        )


def compress(
    x: Float[Array, "B S K H"],
    positions: Float[Array, "l H"],
    first: Float[Array, "l H F"],
    second: Float[Array, "F H"],
    config: NSA,
) -> Float[Array, "B E K H"]:
    """One key or value for each stretch: mean(x) + second . gelu(first . (x + positions)).

    This is equation 7 with a mean and an MLP for phi.
    """
    parts = stretches(x, config.length, config.stride)
    # A token that is not finite makes the results NaN of the stretches that have it. In their
    # gradients 0 must not meet NaN, for they reach other tokens too.
    bad = ~jnp.isfinite(parts).all(axis=(-2, -1))
    parts = cleaned(parts)
    flat = (parts + positions.astype(x.dtype)).reshape(*parts.shape[:3], -1)
    hidden = jax.nn.gelu(flat @ first.astype(x.dtype).reshape(-1, first.shape[-1]))
    return marked(jnp.mean(parts, axis=-2) + hidden @ second.astype(x.dtype), bad)


def nsa_attention(
    q: Float[Array, "B T N H"],
    compressed: tuple[Float[Array, "B E K H"], Float[Array, "B E K H"]],
    selected: tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]],
    window: Float[Array, "B T N H"],
    gates: Float[Array, "B T N 3"],
    q_tokens: Tokens,
    blocks: Blocks,
    stretched: Entries,
    config: NSA,
) -> Float[Array, "B T N H"]:
    """The gated sum of the three branches.

    compressed: keys and values of the stretches. selected: keys and values in the places of
    ``blocks``. window: the output of the third branch. gates: after the sigmoid, in the order
    compressed, selected, window.
    """
    check_heads(q, selected[0])
    out_c, _, picks = compressed_attention(q, *compressed, q_tokens, blocks, stretched, config)
    out_s, _ = selected_attention(
        q, *selected, picks, q_tokens.order, blocks.order, size=config.block
    )
    return gated(out_c, out_s, window, gates)


def gated(compressed, selected, window, gates: Float[Array, "B T N 3"]) -> Float[Array, "B T N H"]:
    """The sum of the branches' results, [B, T, N, H] each, times their gates."""
    parts = zip(
        (compressed, selected, window),
        jnp.split(cleaned(gates).astype(window.dtype), 3, axis=-1),
        strict=True,
    )
    # the gradient of a branch is 0 where that of the sum is, even if the gate is NaN
    return marked(sum(out * gate for out, gate in parts), ~jnp.isfinite(gates).all(axis=-1))
