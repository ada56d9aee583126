"""Multi-head latent attention (MLA; 2405.04434, section 2.1): keys and values of all heads are made
of one vector for each token.

A layer projects a token to a latent vector c [R], which passes through RMSNorm, and to a key part r
[P] that is rotated and shared by all heads. Head n has the key [K_n c, r] and the value V_n c. Its
query may come from a latent vector of its own.

Rows (training, and prompts in chunks) make the keys and values of every head: the expanded form.
Pages keep c and r alone, R + P numbers for each token, and no values. Few queries, as in decoding,
take K_n into the query and V_n behind the weights: q_n . K_n c = (K_nᵀ q_n) . c. That is attention
with one key of R + P numbers for all heads, whose first R numbers are the value.

Where heads are cut over devices, each device has its own heads' queries and matrices, and all
latent vectors.

Dimensions: B rows, T tokens, S places, D model, N heads, R latent, H + P elements of a query and a
key, of which the last P are rotated, V elements of a value.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.blockwise import dense_attention
from attention.cache.reader import PageReader
from attention.cache.writer import PageWriter
from attention.calls import Call, CallShape, latent_call, rows_calls
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
from attention.products import project
from pallas_kernels import finite
from pallas_kernels.latent.api import stored_size
from pallas_kernels.tokens import Tokens


class Sizes(NamedTuple):
    """The sizes of a layer."""

    # N, R, H, P and V.
    heads: int
    latent: int
    plain: int
    rotated: int
    value: int


@dataclasses.dataclass(frozen=True)
class MLA(Method):
    """Keys and values of all heads from one latent vector a token.

    The model's ``head_dim`` is P, the elements of a key that are rotated.
    """

    # R; None for twice P.
    latent: int | None = None
    # Size of the latent vector of queries; None for queries straight from the hidden states.
    query_latent: int | None = None
    # H and V; None for P.
    plain_size: int | None = None
    value_size: int | None = None
    # Whether a pair that is rotated together is elements 2 i and 2 i + 1, and not i and i + P / 2.
    interleaved: bool = False
    # Scores are multiplied by it beside the inverse root of H + P (YaRN's squared magnitude).
    score_factor: float = 1.0
    # Added to mean squares by the RMSNorm of latent vectors.
    eps: float = 1e-6

    mixes = True
    input_heads: ClassVar[tuple[str | None, ...]] = ("kv_heads", None)
    page_heads: ClassVar[str | None] = None

    def __post_init__(self):
        for name in ("latent", "query_latent", "plain_size", "value_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"MLA: {name}={value!r} must be a whole number from 1 on")
        if not self.score_factor > 0:
            raise ValueError(f"MLA: score_factor={self.score_factor} must be above 0")

    def sizes(self, shape: LayerShape) -> Sizes:
        """The sizes of a layer of the method."""
        rotated = shape.head_dim
        return Sizes(
            shape.num_heads,
            self.latent or 2 * rotated,
            self.plain_size or rotated,
            rotated,
            self.value_size or rotated,
        )

    def cut_keys(self):
        return ("main",)

    def windows(self):
        return (None,)

    def parameters(self, shape: LayerShape) -> dict[str, Parameter]:
        heads, latent, plain, rotated, value = self.sizes(shape)
        embed = shape.embed_dim
        of_heads = ("embed", "kv_heads", None)
        inner = self.query_latent or embed
        query = Parameter((inner, heads, plain + rotated), of_heads, inner**-0.5)
        found = {"q": query}
        if self.query_latent is not None:
            found = {
                "q_a": Parameter((embed, inner), ("embed", None), embed**-0.5),
                "q_a_norm": Parameter((inner,), (None,), None),
                "q_b": query,
            }
        return found | {
            "kv_a": Parameter((embed, latent + rotated), ("embed", None), embed**-0.5),
            "kv_a_norm": Parameter((latent,), (None,), None),
            # of each head K and V; latent vectors are cut over ``fsdp`` as hidden states are
            "kv_b": Parameter((latent, heads, plain + value), of_heads, latent**-0.5),
            "out": Parameter(
                (heads, value, embed), ("kv_heads", None, "embed"), (heads * value) ** -0.5
            ),
        }

    # --- The parts of a layer ------------------------------------------------------------------

    def inputs(
        self, parameters: Parameters, y: Float[Array, "B T D"], turn: Turn
    ) -> tuple[jax.Array, ...]:
        """(queries [B, T, N, H + P], latent vectors with the rotated part of the keys behind them
        [B, T, 1, R + P]).
        """

        weights = parameters["q" if self.query_latent is None else "q_b"]
        q = project(self._for_queries(parameters, y), weights.astype(y.dtype))
        both = project(y, parameters["kv_a"].astype(y.dtype))[:, :, None]
        latent = parameters["kv_b"].shape[0]
        rotated = both.shape[-1] - latent
        c = self._normalised(both[..., :latent], parameters["kv_a_norm"])
        q = jnp.concatenate([q[..., :-rotated], self._turned(q[..., -rotated:], turn)], axis=-1)
        return q, jnp.concatenate([c, self._turned(both[..., latent:], turn)], axis=-1)

    def _for_queries(self, parameters: Parameters, y: Float[Array, "B T D"]) -> jax.Array:
        """The vectors that queries are made of: latent ones, or the hidden states."""
        if self.query_latent is None:
            return y
        latent = project(y, parameters["q_a"].astype(y.dtype))
        return self._normalised(latent, parameters["q_a_norm"])

    def _normalised(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """RMSNorm in float32 or wider."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + self.eps) * weight.astype(wide.dtype)).astype(x.dtype)

    def _turned(self, x: Float[Array, "B T N P"], turn: Turn) -> Float[Array, "B T N P"]:
        """x rotated, with the first elements of all pairs in its first half.

        Scores do not depend on the order of elements, which queries and keys share.
        """
        if self.interleaved:
            x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        return turn(x)

    def output(
        self, parameters: Parameters, mixed: Float[Array, "B T N V"]
    ) -> Float[Array, "B T D"]:
        return project(mixed, parameters["out"].astype(mixed.dtype), 2)

    def _expanded(
        self, parameters: Parameters, q: Float[Array, "B T N H+P"], latent: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(q, k, v) of one size, zeros behind the elements of the smaller ones."""
        weights = parameters["kv_b"].astype(q.dtype)
        rank = weights.shape[0]
        r = latent[..., rank:]
        plain = q.shape[-1] - r.shape[-1]
        both = project(latent[:, :, 0, :rank], weights)
        k, v = both[..., :plain], both[..., plain:]
        k = jnp.concatenate([k, jnp.broadcast_to(r, (*k.shape[:-1], r.shape[-1]))], axis=-1)
        size = max(k.shape[-1], v.shape[-1])

        def padded(x):
            return jnp.pad(x, ((0, 0),) * 3 + ((0, size - x.shape[-1]),))

        q = padded(self._scaled(q, size, q.shape[-1]))
        return q, padded(k), padded(v)

    def _scaled(self, q: jax.Array, size: int, own: int) -> jax.Array:
        """Queries for attention that scales by size^-1/2, where own^-1/2 is meant."""
        factor = self.score_factor * (size / own) ** 0.5
        wide = jnp.promote_types(q.dtype, jnp.float32)
        return q if factor == 1 else (q.astype(wide) * factor).astype(q.dtype)

    def _value_size(self, parameters: Parameters, q: jax.Array, latent: jax.Array) -> int:
        """V, by the shapes of a layer's arrays."""
        rank, _, both = parameters["kv_b"].shape
        return both - (q.shape[-1] - (latent.shape[-1] - rank))

    # --- Rows ----------------------------------------------------------------------------------

    def mix(
        self, parameters: Parameters, inputs: tuple[jax.Array, ...], layout: Layout
    ) -> Float[Array, "B T N V"]:
        """The results of whole rows, or of this device's part of their tokens."""
        q, latent = inputs
        value = self._value_size(parameters, q, latent)
        q, k, v = self._expanded(parameters, q, latent)
        return layout.attend(q, (k, v))[..., :value]

    # --- Pages ---------------------------------------------------------------------------------

    def pages(self, shape: PageShape) -> LayerPages:
        assert shape.layer is not None
        sizes = self.sizes(shape.layer)
        size = stored_size(sizes.latent + sizes.rotated)
        pages = (shape.num_pages, 1, shape.page, size)
        return {"latent": jax.ShapeDtypeStruct(pages, shape.dtype)}

    def mix_pages(
        self,
        parameters: Parameters,
        pages: LayerPages,
        inputs: tuple[jax.Array, ...],
        at: PageWriter,
        q_tokens: Tokens,
        reader: PageReader,
    ) -> tuple[Float[Array, "B T N V"], LayerPages]:
        """(the results of new tokens, the pages with their latent vectors)."""
        q, new = inputs
        kept = self._written(parameters, pages, new, at)
        rows = q.reshape(*q_tokens.shape, *q.shape[2:])
        out = self._read(parameters, rows, kept, q_tokens, reader, new.shape[-1])
        return out.reshape(*q.shape[:3], -1), {"latent": kept}

    def _written(
        self,
        parameters: Parameters,
        pages: LayerPages,
        new: Float[Array, "B T 1 R+P"],
        at: PageWriter,
    ) -> Float[Array, "pages 1 page E"]:
        """The pages with new latent vectors."""
        # Values are finite in pages, and keys NaN where they were not: see ``finite``.
        rank = parameters["kv_b"].shape[0]
        r, c = finite.kept(new[..., rank:], new[..., :rank])
        more = pages["latent"].shape[-1] - new.shape[-1]
        both = jnp.pad(jnp.concatenate([c, r], axis=-1), ((0, 0),) * 3 + ((0, more),))
        return at.put_whole(pages["latent"], both)

    def _read(
        self,
        parameters: Parameters,
        q: Float[Array, "B T N H+P"],
        kept: Float[Array, "pages 1 page E"],
        q_tokens: Tokens,
        reader: PageReader,
        size: int,
    ) -> Float[Array, "B T N V"]:
        """Attention to all latent vectors of pages that a query sees. size: R + P."""
        if reader.few(q):
            wide = self._absorbed(parameters, q, size)
            rank = parameters["kv_b"].shape[0]
            out = reader.latent(kept, rank, wide, q_tokens)
            return self._values(parameters, q, out, size)
        latent = reader.joined(kept, reader.pages.tokens)[..., :size]
        value = self._value_size(parameters, q, latent)
        q, k, v = self._expanded(parameters, q, latent)
        return dense_attention(q, k, v, q_tokens, reader.pages.tokens)[0][..., :value]

    def _absorbed(
        self, parameters: Parameters, q: Float[Array, "B T N H+P"], size: int
    ) -> Float[Array, "B T N R+P"]:
        """Queries of latent vectors, with the matrix of keys in them. size: R + P."""
        weights = parameters["kv_b"].astype(q.dtype)
        plain = q.shape[-1] - (size - weights.shape[0])
        # The sum over a head's elements, and the one over latent elements in ``_values``, is that
        # of a product of each token with one matrix for each head.
        inside = jnp.einsum("BTNH,RNH->BTNR", q[..., :plain], weights[..., :plain])
        wide = jnp.concatenate([inside, q[..., plain:]], axis=-1)
        return self._scaled(wide, size, q.shape[-1])

    def _values(
        self,
        parameters: Parameters,
        q: Float[Array, "B T N H+P"],
        out: Float[Array, "B T N R"],
        size: int,
    ) -> Float[Array, "B T N V"]:
        """Results that are sums of latent vectors as sums of values. size: R + P."""
        weights = parameters["kv_b"].astype(out.dtype)
        plain = q.shape[-1] - (size - weights.shape[0])
        return jnp.einsum("BTNR,RNV->BTNV", out, weights[..., plain:])

    # --- What it costs and how it runs ---------------------------------------------------------

    def token_bytes(self, shape: LayerShape, dtype: str) -> int:
        sizes = self.sizes(shape)
        return (sizes.latent + sizes.rotated) * jnp.dtype(dtype).itemsize

    def decode_bytes(self, tokens: int, shape: LayerShape, dtype: str) -> int:
        return tokens * self.token_bytes(shape, dtype)

    def pair_size(self, shape: LayerShape, decode: bool) -> int:
        sizes = self.sizes(shape)
        if decode:
            return 2 * sizes.latent + sizes.rotated
        return sizes.plain + sizes.rotated + sizes.value

    def calls(self, shape: CallShape) -> tuple[Call, ...]:
        sizes = self.sizes(LayerShape(0, shape.num_heads, shape.num_kv_heads, shape.head_dim))
        whole = max(sizes.plain + sizes.rotated, sizes.value)
        rows = dataclasses.replace(shape, num_kv_heads=shape.num_heads, head_dim=whole)
        pages = dataclasses.replace(shape, num_kv_heads=1, head_dim=sizes.latent + sizes.rotated)
        return (*rows_calls("all keys", rows), latent_call("all keys", pages, sizes.latent))
