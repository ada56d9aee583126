"""DeepSeek sparse attention (DSA; DeepSeek-V3.2's report, section 2.1): latent attention (``mla``)
to the keys that an indexer chooses for each query.

Beside the latent vector, a layer makes of each token one key for its indexer, and for each of the
indexer's heads a query and a weight (``attention.indexer``). Of the indexer's queries and keys the
first P elements are rotated. All heads of attention share the choice.

Rows and pages in which no query can see more than ``picks`` keys are those of MLA. Else queries
attend to the chosen latent vectors, with the matrices of keys and values taken into the query and
behind the weights, as in decoding. Pages keep the indexer's key beside the latent vector.

With ``index_loss`` the indexer learns, from detached hidden states. ``all_keys`` is the stage
before: queries attend to all that they see, and the indexer learns from all of it.

One indexer may serve several layers (GLM-5; 2603.12201): those behind it, with ``shared``, attend
to the same keys and have no indexer.

Departures: the published indexer multiplies queries and keys by a Hadamard matrix and rounds them
to FP8. The matrix changes no score, and here nothing is rounded. An indexer that several layers
share learns from its own layer's attention, not from the mean of all.

Dimensions: those of ``mla`` and ``attention.indexer``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.cache.reader import PageReader
from attention.cache.writer import PageWriter
from attention.calls import Call, CallShape
from attention.indexed import Indexed
from attention.indexer import Scoring, attend_all, attend_chosen, choose, gathered, with_noted
from attention.layout import Layout
from attention.methods.method import (
    LayerPages,
    LayerShape,
    Method,
    PageShape,
    Parameter,
    Parameters,
    Turn,
)
from attention.methods.mla import MLA
from attention.products import project
from attention.query_cost import QueryCost
from pallas_kernels.paged.lists import lookup
from pallas_kernels.paged.reference import NO_PAGE
from pallas_kernels.tokens import Tokens

# Added to variances by the LayerNorm of the indexer's keys.
_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class DSA(MLA):
    """MLA to chosen keys; the defaults are those of DeepSeek-V3.2 (its config.json)."""

    # Keys that a query attends to.
    picks: int = 2048
    # I and D, the heads of the indexer and their elements.
    index_heads: int = 64
    index_size: int = 128
    # Whether the indexer's pairs are elements 2 i and 2 i + 1, as in GLM-5.
    index_interleaved: bool = False
    # The weight of the indexer's loss, 0 for an indexer that does not learn.
    index_loss: float = 0.0
    # Whether queries attend to all keys, while the indexer learns.
    all_keys: bool = False
    # Whether the layer attends to the keys that the layer before it chose.
    shared: bool = False

    indexes = True
    input_heads: ClassVar[tuple[str | None, ...]] = ("kv_heads", None, None, None, None)

    def __post_init__(self):
        super().__post_init__()
        for name in ("picks", "index_heads", "index_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"DSA: {name}={value!r} must be a whole number from 1 on")
        if not self.index_loss >= 0:
            raise ValueError(f"DSA: index_loss={self.index_loss} must be at least 0")
        if self.all_keys and self.shared:
            raise ValueError(
                "DSA: shared=True takes the keys that another layer chose, and with "
                "all_keys=True none are chosen; leave one of the two out"
            )

    def noted_picks(self):
        return None if self.shared or self.all_keys else self.picks

    def pick_size(self):
        return 1

    def pick_lists(self, num_kv_heads):
        return 1

    # --- The parts of a layer ------------------------------------------------------------------

    def parameters(self, shape: LayerShape) -> dict[str, Parameter]:
        found = super().parameters(shape)
        if self.shared:
            return found
        heads, size, embed = self.index_heads, self.index_size, shape.embed_dim
        if size < shape.head_dim:
            raise ValueError(
                f"DSA: index_size={size} must be at least the {shape.head_dim} elements that are "
                "rotated (head_dim)"
            )
        inner = self.query_latent or embed
        return found | {
            "index_q": Parameter((inner, heads, size), ("embed", None, None), inner**-0.5),
            "index_k": Parameter((embed, size), ("embed", None), embed**-0.5),
            "index_k_norm": Parameter((size,), (None,), None),
            "index_k_bias": Parameter((size,), (None,), 0.0),
            "index_weights": Parameter((embed, heads), ("embed", None), embed**-0.5),
        }

    def inputs(
        self, parameters: Parameters, y: Float[Array, "B T D"], turn: Turn
    ) -> tuple[jax.Array, ...]:
        """The inputs of MLA, and of ``indexer.Scoring``, which pass no gradient on."""
        found = super().inputs(parameters, y, turn)
        if self.shared:
            return found
        given = jax.lax.stop_gradient(self._for_queries(parameters, y))
        y = jax.lax.stop_gradient(y)
        q = project(given, parameters["index_q"].astype(y.dtype))
        k = project(y, parameters["index_k"].astype(y.dtype))
        wide = k.astype(jnp.promote_types(k.dtype, jnp.float32))
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPS)
        wide = wide * parameters["index_k_norm"].astype(wide.dtype)
        k = (wide + parameters["index_k_bias"].astype(wide.dtype)).astype(y.dtype)
        weights = project(y, parameters["index_weights"].astype(y.dtype))
        rotated = found[1].shape[-1] - parameters["kv_b"].shape[0]

        def turned(x):
            first = x[..., :rotated]
            if self.index_interleaved:
                first = jnp.concatenate([first[..., ::2], first[..., 1::2]], axis=-1)
            return jnp.concatenate([turn(first), x[..., rotated:]], axis=-1)

        return *found, turned(q), turned(k[:, :, None]), weights[..., None]

    # --- Rows ----------------------------------------------------------------------------------

    def mix_indexed(
        self,
        parameters: Parameters,
        inputs: tuple[jax.Array, ...],
        layout: Layout,
        earlier: Indexed,
        noted: tuple[jax.Array, jax.Array, bool] | None,
        over: tuple[str, ...],
    ) -> tuple[Float[Array, "B T N V"], Indexed]:
        q, latent, *rest = (self._real(x, layout.queries) for x in inputs)
        own = None if self.shared else Scoring(*rest)
        if own is not None:
            # every device has the keys of whole rows: they are few numbers a token
            own = own._replace(keys=layout.whole(own.keys))
        learns = own is not None and self.index_loss > 0
        picks, shares = earlier.picks, None
        if own is not None:
            picks = None
            if self._chooses(layout.tokens):
                picks = choose(own, layout.queries, layout.tokens, self.picks)
                if noted is not None:
                    rows = (layout.queries, layout.tokens, *noted, layout.ring)
                    picks, shares = with_noted(picks, *rows)
        if picks is None:
            if own is None or not learns:
                return self.mix(parameters, (q, latent), layout), Indexed()
            out, loss = self._all(parameters, q, layout.whole(latent), own, layout, over)
            return out, Indexed(loss=self._of_real(loss, layout))
        latent = layout.whole(latent)
        size = latent.shape[-1]
        rank = parameters["kv_b"].shape[0]
        wide = self._absorbed(parameters, q, size)
        out, loss = attend_chosen(wide, latent[:, :, 0], picks, rank, own if learns else None, over)
        loss = self._of_real(loss, layout) if learns else None
        return self._values(parameters, q, out, size), Indexed(picks, loss, shares)

    def _chooses(self, tokens: Tokens) -> bool:
        """True where a query may see more keys than it attends to."""
        return not self.all_keys and tokens.shape[1] > self.picks

    def _all(self, parameters, q, latent, own: Scoring, layout: Layout, over: tuple[str, ...]):
        """(the result, the divergence of each query), where all keys are attended to."""
        value = self._value_size(parameters, q, latent)
        q, k, v = self._expanded(parameters, q, latent)
        out, loss = attend_all(q, k, v, own, layout.queries, layout.tokens, over)
        return out[..., :value], loss

    @staticmethod
    def _real(x: Float[Array, "B S heads E"], tokens: Tokens) -> jax.Array:
        """x with zeros in place of padding, whose gradients may not be finite either."""
        return jnp.where((tokens.segments > 0)[..., None, None], x, 0)

    @staticmethod
    def _of_real(loss: Float[Array, "B T"], layout: Layout) -> Float[Array, "B T"]:
        return jnp.where(layout.queries.segments > 0, loss, 0.0)

    # --- Pages ---------------------------------------------------------------------------------

    def pages(self, shape: PageShape) -> LayerPages:
        found = super().pages(shape)
        if self.shared:
            return found
        pages = (shape.num_pages, 1, shape.page, self.index_size)
        return found | {"index": jax.ShapeDtypeStruct(pages, shape.dtype)}

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
        q, new, *rest = inputs
        size = new.shape[-1]
        kept = {"latent": self._written(parameters, pages, new, at)}
        own = None
        if not self.shared:
            own = Scoring(*rest)
            kept["index"] = at.put_whole(pages["index"], own.keys)
        rows = q.reshape(*q_tokens.shape, *q.shape[2:])
        picks = earlier if own is None else None
        if own is not None and self._chooses(reader.pages.tokens):
            asking = (x.reshape(*q_tokens.shape, *x.shape[2:]) for x in (own.queries, own.weights))
            queries, weights = asking
            keys = reader.joined(kept["index"], reader.pages.tokens)
            found = Scoring(queries, keys, weights)
            picks = choose(found, q_tokens, reader.pages.tokens, self.picks)
        if picks is None:
            out = self._read(parameters, rows, kept["latent"], q_tokens, reader, size)
            return out.reshape(*q.shape[:3], -1), kept, None
        rank = parameters["kv_b"].shape[0]
        wide = self._absorbed(parameters, rows, size)
        if reader.few(rows):
            latent = self._at(kept["latent"], picks, reader)[..., :size].astype(q.dtype)
            out = gathered(wide, latent, picks, rank)
        else:
            latent = reader.joined(kept["latent"], reader.pages.tokens)[:, :, 0, :size]
            out = attend_chosen(wide, latent, picks, rank, None, ())[0]
        out = self._values(parameters, rows, out, size)
        return out.reshape(*q.shape[:3], -1), kept, picks

    @staticmethod
    def _at(
        kept: Float[Array, "pages 1 page E"], picks: Int[Array, "B T n"], reader: PageReader
    ) -> Float[Array, "B T n E"]:
        """The latent vectors at places of rows, from where they lie; anything for -1."""
        rows, count, each = picks.shape
        places = picks.reshape(rows, count * each)
        page = lookup(reader.pages.tables, jnp.where(places < 0, -1, places // reader.page))
        page = jnp.where(page < 0, NO_PAGE, page)
        found = kept.at[page, 0, places % reader.page].get(mode="fill", fill_value=0)
        return found.reshape(*picks.shape, -1)

    # --- What it costs and how it runs ---------------------------------------------------------

    def token_bytes(self, shape: LayerShape, dtype: str) -> int:
        more = 0 if self.shared else self.index_size * jnp.dtype(dtype).itemsize
        return super().token_bytes(shape, dtype) + more

    def decode_bytes(self, tokens: int, shape: LayerShape, dtype: str) -> int:
        latent = MLA.token_bytes(self, shape, dtype)
        read = tokens if self.all_keys else min(tokens, self.picks)
        return read * latent + tokens * (self.token_bytes(shape, dtype) - latent)

    def query_cost(self, shape: LayerShape, row: int, seen: float, decode: bool) -> QueryCost:
        # a product with each key, and one with the weight of the head (``indexer.scores``)
        scoring = 0 if self.shared else self.index_heads * (self.index_size + 1)
        learns = scoring if self.index_loss > 0 and not decode else 0
        if self.all_keys or row <= self.picks:
            # the loss compares the scores of all keys, which are computed for every pair
            return super().query_cost(shape, row, seen, decode)._replace(chosen=seen * learns)
        picked = min(seen, self.picks)
        # in latent form, in rows as in pages
        size = shape.num_heads * self.pair_size(shape, decode=True)
        return QueryCost(0.0, chosen=picked * (size + learns), scored=seen * scoring)

    def calls(self, shape: CallShape) -> tuple[Call, ...]:
        if self.all_keys:
            return super().calls(shape)
        dense = {call.phase: call for call in super().calls(shape)}
        found = []
        for phase, call in dense.items():
            if shape.keys(phase)[1] <= self.picks and not (phase == "train" and self.index_loss):
                found.append(call)
            else:
                found.append(Call("chosen keys", phase, _no_kernel))
        return tuple(found)


def check_indexers(methods: Sequence[Method]) -> None:
    """Raises ValueError for a period of layers in which one shares an indexer that is not there."""
    before = None
    for method in methods:
        if not isinstance(method, DSA):
            before = None
        elif not method.shared:
            before = method
        elif before is None or before.picks != method.picks:
            raise ValueError(
                f"attention={methods}: a layer with shared=True must stand behind one with an "
                "indexer and as many picks, in the same period"
            )
    weights = {method.index_loss for method in methods if isinstance(method, DSA)} - {0.0}
    if len(weights) > 1:
        raise ValueError(f"attention={methods}: index_loss must be one number")


def _no_kernel(platform: str, name: str, dtype: str) -> str:
    return "kernels read blocks of keys, and here each query has single keys of its own"
