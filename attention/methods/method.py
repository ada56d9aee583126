"""The interface of a method of attention: settings, parameters, attention over rows and attention
over pages.

A method is a frozen dataclass: its fields are its settings. It inherits from ``Method``, whose
defaults are attention to every key with the layer's own keys and values, and overrides what
differs. The shared code (the model, the paged cache, documents, benchmarks) asks the method and
knows none by name.

To add a method, write a file beside this one and add it to ``api.METHODS``. Or write it in a
package of your own and name it ``package.module:Class`` in a config; ``docs/adding.md`` has a whole
example.

A layer calls a method in this order:

    training and whole rows                    a paged cache (prompts in chunks, decoding)
    new_keys        from hidden states         new_keys        the same
    derived_keys    from all keys of a row     write           into pages, which may derive keys
    positions       by which keys rotate       (keys are rotated when written)
    head_inputs     what each query adds       head_inputs     the same
    attend                                     attend_pages

Dimensions: B rows, T queries or new tokens, S keys, D model, N query heads, K key/value heads, H
head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.cache.reader import PageReader
from attention.cache.writer import PageWriter
from attention.calls import Call, CallShape
from attention.indexed import Indexed
from attention.keys import Keys
from attention.layout import Layout
from attention.query_cost import QueryCost
from pallas_kernels.tokens import Tokens

# What a layer keeps in pages, by name: (k, v) or one array, [pages, ...] each.
LayerPages = dict[str, Any]
# The parameters that a layer has for its method, by name, without the axis of layers.
Parameters = Mapping[str, jax.Array]
# A function of x [B, T, heads, H] that rotates it by the positions of its tokens.
Turn = Callable[[jax.Array], jax.Array]
# A function of (a random key, a shape) that draws initial values.
Draw = Callable[[jax.Array, tuple[int, ...]], jax.Array]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a layer: shape, dtype, logical axes and initial values in one place."""

    # Without the axis of layers, which the model puts first.
    shape: tuple[int, ...]
    # A key of models.sharding.RULES for every axis, or None for one that is never cut.
    axes: tuple[str | None, ...]
    # Standard deviation of a truncated normal; 0.0 for zeros, None for ones; or what draws other
    # values.
    std: float | Draw | None
    # None for the dtype of the model's other parameters.
    dtype: str | None = None
    # The parameter of the layer, "k" or "v", that this one begins as a copy of where a model that
    # was trained without it takes the method up.
    like: str | None = None


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer that a method's parameters depend on."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class PageShape:
    """The sizes of a layer's pages in a cache."""

    num_pages: int
    num_kv_heads: int
    # Tokens of a page.
    page: int
    head_dim: int
    dtype: Any
    # The most tokens at the end of a row that may be taken back after they were written.
    undone: int = 0
    # Sizes of the layer.
    layer: LayerShape | None = None

    def pair(self, length: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The shape of (k, v) [pages, K, length, H], with ``length`` keys in a page."""
        shape = (self.num_pages, self.num_kv_heads, length, self.head_dim)
        return jax.ShapeDtypeStruct(shape, self.dtype), jax.ShapeDtypeStruct(shape, self.dtype)


class Method:
    """The protocol of a method of attention.

    The defaults are for attention with the layer's own keys and values and without parameters.
    """

    # Whether decoding attends to every place of the pages and needs nothing but q, k and v. A
    # decoding loop may then lay the pages side by side once for several tokens
    # (``cache.gathered``).
    reads_all_pages = False
    # Reason why a config without the section ``documents`` is refused; "" for none.
    needs_documents = ""
    # Whether the method takes the place of the layer's projections q, k, v and o too. It then has
    # ``inputs``, ``mix``, ``mix_pages`` and ``output`` in place of what is from ``new_keys`` to
    # ``attend_pages``.
    mixes = False
    # Whether such a method keeps a state that each token changes, in place of keys.
    keeps_state = False
    # Whether such a method attends to single keys that an indexer chooses (``indexer``). It then
    # has ``mix_indexed`` and ``mix_pages_indexed`` in place of ``mix`` and ``mix_pages``.
    indexes = False
    # With ``mixes``, the logical axis of the heads of each of ``inputs``: "kv_heads", or None for
    # an input that every device has whole.
    input_heads: ClassVar[tuple[str | None, ...]] = ()
    # The logical axis of the heads of pages, their second axis.
    page_heads: ClassVar[str | None] = "kv_heads"

    # --- Settings that shared code asks for ----------------------------------------------------

    def block_size(self) -> int | None:
        """Tokens of the blocks that queries choose from; None for a method without blocks.

        A page of a cache is then one block.
        """
        return None

    def cut_keys(self) -> tuple[str, ...]:
        """The branches of keys of which ``attend`` reads no more than the device's own part, where
        the tokens of rows are cut over devices. It reads them through the layout
        (``Layout.attend``, ``place``, ``attend_chosen``). Of other branches it gets whole rows.
        """
        return ()

    def noted_picks(self) -> int | None:
        """The most blocks that a query chooses by each key/value head, where the choice can be
        noted and replayed (``attention.picks``); None where it cannot.

        Such a method also has ``choose``, and ``choose_pages`` for the sampler.
        """
        return None

    def pick_size(self) -> int | None:
        """With ``noted_picks``, the tokens that a noted number stands for."""
        return self.block_size()

    def pick_lists(self, num_kv_heads: int) -> int:
        """With ``noted_picks``, the lists of picks that a query has."""
        return num_kv_heads

    def chunk(self, page: int) -> int:
        """The number of tokens of which the tokens of a prefill must be a multiple, so that results
        do not depend on the chunks in which a prompt is prefilled.

        page: tokens of a page; 0 for the number of which the first slot of a sequence in rows
        without branches should be a multiple.
        """
        return 1

    def windows(self) -> tuple[int | None, ...]:
        """The windows of the attention that does not choose keys: tokens, or None for all keys."""
        return ()

    # --- Parameters and keys -------------------------------------------------------------------

    def parameters(self, shape: LayerShape) -> dict[str, Parameter]:
        """Parameters of a layer beside those that all layers have, by name."""
        return {}

    def derives(self) -> tuple[str, ...]:
        """The parameters that ``derived_keys`` multiplies by keys, not by hidden states."""
        return ()

    def new_keys(
        self,
        parameters: Parameters,
        y: Float[Array, "B T D"],
        normalise: Callable[[jax.Array], jax.Array],
    ) -> Keys:
        """Keys and values of new tokens for the branches beside "main", not rotated.

        y: normalised hidden states. normalise: what the model does to keys after their projection;
        the RMSNorm of Qwen3, or the identity.
        """
        return {}

    def derived_keys(self, parameters: Parameters, keys: Keys, layout: Layout) -> Keys:
        """Keys and values that are computed from the other keys of whole rows, not rotated.

        With ``cut_keys``, where the tokens of rows are cut, both are this device's part.
        """
        return {}

    def positions(self, positions: Int[Array, "B S"], layout: Layout) -> dict[str, jax.Array]:
        """For each branch whose keys ``attend`` reads, the positions that RoPE rotates them by.

        positions: those of the rows' tokens.
        """
        return {"main": positions}

    def head_inputs(
        self, parameters: Parameters, y: Float[Array, "B T D"]
    ) -> Float[Array, "B T N parts"] | None:
        """The input of attention for every query head beside q, such as gates or a learned slope.

        None if it needs nothing.
        """
        return None

    # --- Attention over rows -------------------------------------------------------------------

    def prepare(self, layout: Layout) -> Any:
        """The facts about the rows that all layers of this method need, computed once for all of
        them.

        A pytree of arrays whose first axis is that of the rows.
        """
        return None

    def attend(
        self,
        q: Float[Array, "B T N H"],
        keys: Keys,
        layout: Layout,
        inputs: Float[Array, "B T N parts"] | None,
    ) -> Float[Array, "B T N H"]:
        """Attention of whole rows, in training and when a prompt's rows are computed at once.

        keys: the branches that ``positions`` names, rotated as q is. inputs: from ``head_inputs``.
        Under a mesh it runs within ``shard_map``: every device has its own rows and heads, and its
        part of the queries where those are cut (``Layout``).
        """
        raise NotImplementedError(f"{type(self).__name__}.attend")

    def choose(
        self, q: Float[Array, "B T N H"], keys: Keys, layout: Layout
    ) -> tuple[jax.Array, Int[Array, "B T K n"]]:
        """With ``noted_picks``, the first half of ``attend``: (what it found so far, the blocks of
        the rows that each query attends to, -1 for none).
        """
        raise NotImplementedError(f"{type(self).__name__}.choose")

    def attend_chosen_blocks(
        self,
        q: Float[Array, "B T N H"],
        keys: Keys,
        layout: Layout,
        inputs: Float[Array, "B T N parts"] | None,
        found: jax.Array,
        picks: Int[Array, "B T K n"],
    ) -> Float[Array, "B T N H"]:
        """With ``noted_picks``, the second half, which attends to these blocks."""
        raise NotImplementedError(f"{type(self).__name__}.attend_chosen_blocks")

    # --- Methods with projections of their own -------------------------------------------------

    def inputs(
        self, parameters: Parameters, y: Float[Array, "B T D"], turn: Turn
    ) -> tuple[jax.Array, ...]:
        """With ``mixes``, the projections of normalised hidden states, [B, T, heads, ...] each,
        where heads are cut as ``input_heads`` says.

        turn: rotates by the positions of the tokens.
        """
        raise NotImplementedError(f"{type(self).__name__}.inputs")

    def mix(
        self, parameters: Parameters, inputs: tuple[jax.Array, ...], layout: Layout
    ) -> Float[Array, "B T K V"]:
        """With ``mixes``, the results of whole rows.

        Under a mesh every device has its own rows and heads, and with ``cut_keys`` its part of the
        tokens (``Layout``).
        """
        raise NotImplementedError(f"{type(self).__name__}.mix")

    def mix_pages(
        self,
        parameters: Parameters,
        pages: LayerPages,
        inputs: tuple[jax.Array, ...],
        at: PageWriter,
        q_tokens: Tokens,
        reader: PageReader,
    ) -> tuple[Float[Array, "B T K V"], LayerPages]:
        """With ``mixes``, (the results of new tokens, the pages with them or with their states).

        q_tokens, reader: the tokens as attention sees them and the pages that they see, of the same
        rows as ``inputs`` or of rows of one token each.
        """
        raise NotImplementedError(f"{type(self).__name__}.mix_pages")

    def mix_indexed(
        self,
        parameters: Parameters,
        inputs: tuple[jax.Array, ...],
        layout: Layout,
        earlier: Indexed,
        noted: tuple[jax.Array, jax.Array, bool] | None,
        over: tuple[str, ...],
    ) -> tuple[Float[Array, "B T N V"], Indexed]:
        """With ``indexes``, (the results of whole rows, what the indexer gives beside them).

        earlier: that of the layer before, whose picks a layer may share. noted: (a sampler's picks
        [B, M, n] by order; the slots of its queries [B, M]; whether to attend to these picks).
        over: the mesh axes over which heads are cut.
        """
        raise NotImplementedError(f"{type(self).__name__}.mix_indexed")

    def mix_pages_indexed(
        self,
        parameters: Parameters,
        pages: LayerPages,
        inputs: tuple[jax.Array, ...],
        at: PageWriter,
        q_tokens: Tokens,
        reader: PageReader,
        earlier: Int[Array, "B T n"] | None,
    ) -> tuple[Float[Array, "B T N V"], LayerPages, Int[Array, "B T n"] | None]:
        """With ``indexes``, ``mix_pages`` and the places that the queries attend to, -1 for none;
        None where they attend to all that they see.

        earlier: those of the layer before.
        """
        raise NotImplementedError(f"{type(self).__name__}.mix_pages_indexed")

    def output(
        self, parameters: Parameters, mixed: Float[Array, "B T K V"]
    ) -> Float[Array, "B T D"]:
        """With ``mixes``, the projection of results back to hidden states."""
        raise NotImplementedError(f"{type(self).__name__}.output")

    # --- Pages of a cache ----------------------------------------------------------------------

    def pages(self, shape: PageShape) -> LayerPages:
        """Shapes and dtypes of what a layer keeps in pages."""
        return {"main": shape.pair(shape.page)}

    def write(
        self, pages: LayerPages, keys: Keys, at: PageWriter, parameters: Parameters
    ) -> LayerPages:
        """The pages with the keys of new tokens written into them.

        keys: "main" and what ``new_keys`` gives. The branches of ``rotated_when_written`` are
        rotated already.
        """
        return {**pages, "main": at.put(pages["main"], keys["main"])}

    def rotated_when_written(self) -> tuple[str, ...]:
        """The branches, of ``new_keys`` and "main", that pages keep rotated."""
        return ("main",)

    def attend_pages(
        self,
        pages: LayerPages,
        q: Float[Array, "B T N H"],
        q_tokens: Tokens,
        reader: PageReader,
        inputs: Float[Array, "B T N parts"] | None,
    ) -> Float[Array, "B T N H"]:
        """Attention of new tokens, whose own keys have been written, to pages."""
        raise NotImplementedError(f"{type(self).__name__}.attend_pages")

    def append_pages(
        self,
        pages: LayerPages,
        keys: Keys,
        at: PageWriter,
        parameters: Parameters,
        q: Float[Array, "B T N H"],
        q_tokens: Tokens,
        reader: PageReader,
        inputs: Float[Array, "B T N parts"] | None,
    ) -> tuple[Float[Array, "B T N H"], LayerPages]:
        """``write`` and ``attend_pages``: (the result, the pages with the new keys)."""
        pages = self.write(pages, keys, at, parameters)
        return self.attend_pages(pages, q, q_tokens, reader, inputs), pages

    def choose_pages(
        self, pages: LayerPages, q: Float[Array, "B T N H"], q_tokens: Tokens, reader: PageReader
    ) -> tuple[jax.Array, Int[Array, "B T C n"]]:
        """With ``noted_picks``, the first half of ``attend_pages``, which does not read "main".

        Returns (what it found so far, the numbers of the pages that the second half reads, -1 for
        none).
        """
        raise NotImplementedError(f"{type(self).__name__}.choose_pages")

    def attend_chosen(
        self,
        pages: LayerPages,
        q: Float[Array, "B T N H"],
        q_tokens: Tokens,
        reader: PageReader,
        inputs: Float[Array, "B T N parts"] | None,
        found: jax.Array,
        picks: Int[Array, "B T C n"],
    ) -> Float[Array, "B T N H"]:
        """With ``noted_picks``, the second half, which reads the chosen pages."""
        raise NotImplementedError(f"{type(self).__name__}.attend_chosen")

    # --- What it costs and how it runs ---------------------------------------------------------

    def decode_bytes(self, tokens: int, shape: LayerShape, dtype: str) -> int:
        """Most bytes of keys and values that a layer reads to decode token number ``tokens``.

        This is the measure of 2502.11089, table 4.
        """
        return tokens * shape_bytes(shape, dtype)

    def pair_size(self, shape: LayerShape, decode: bool) -> int:
        """Elements of a key and of a value that a head multiplies for each query that sees them."""
        return 2 * shape.head_dim

    def query_cost(self, shape: LayerShape, row: int, seen: float, decode: bool) -> QueryCost:
        """Elements that a layer multiplies for a query.

        row: slots of a row, or places of pages. seen: keys of it that the query sees.
        """
        return QueryCost(seen * shape.num_heads * self.pair_size(shape, decode))

    def gathered_elements(self, shape: LayerShape, row: int) -> int:
        """Elements of queries that a layer copies at a time in training, to attend to blocks.

        row: slots of a row, or of a part of it that a device has.
        """
        return 0

    def calls(self, shape: CallShape) -> tuple[Call, ...]:
        """The attention calls of a layer that a kernel may serve, for ``implementations``."""
        return ()


def shape_bytes(shape: LayerShape, dtype: str) -> int:
    """Bytes of one token's keys and values."""
    return 2 * shape.num_kv_heads * shape.head_dim * jnp.dtype(dtype).itemsize
