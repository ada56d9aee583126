"""Gated documents: an ablation of squid in which other documents have a softmax of their own.

In squid (``squid.Squid``) one softmax runs over everything that a token sees. A document sees
itself and what lies before all documents, and the tail, which follows them, sees all.

Here there are two softmaxes. One runs over the keys outside of other documents: those of the
token's own document, of the prefix and of the tail. The other runs over the keys inside of other
documents. The results are added with gates of the query, as NSA's branches are (2502.11089,
equation 5): o = g_1 Attn(q, own) + g_2 Attn(q, documents). Only the tail sees other documents, so
the second part is 0 for all other tokens.

Dimensions: B rows, T queries, S keys, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.blockwise import dense_attention
from attention.calls import Call, CallShape, rows_calls
from attention.methods.method import LayerShape, Method, Parameter
from attention.products import project
from pallas_kernels.finite import cleaned, marked
from pallas_kernels.tokens import TAIL, Tokens


@dataclasses.dataclass(frozen=True)
class GatedDocuments(Method):
    """Attention to every key that a token may see, in two parts with a softmax and a gate each."""

    def cut_keys(self):
        return ("main",)

    def parameters(self, shape: LayerShape) -> dict[str, Parameter]:
        size = (shape.embed_dim, shape.num_heads, 2)
        return {"gates": Parameter(size, ("embed", "heads", None), shape.embed_dim**-0.5)}

    def head_inputs(self, parameters, y):
        """The gates, after the sigmoid."""
        return jax.nn.sigmoid(project(y, parameters["gates"].astype(y.dtype)))

    def attend(self, q, keys, layout, inputs):
        queries, tokens = layout.queries, layout.tokens
        return gated_documents(q, keys["main"], queries, tokens, inputs, layout.attend_as)

    def attend_pages(self, pages, q, q_tokens, reader, inputs):
        keys = reader.rows(pages["main"])
        return gated_documents(q, keys, q_tokens, reader.pages.tokens, inputs)

    def calls(self, shape: CallShape) -> tuple[Call, ...]:
        return rows_calls("own keys, other documents", shape, decode=True)


def _attend(q, keys, q_tokens: Tokens, k_tokens: Tokens):
    return dense_attention(q, *keys, q_tokens, k_tokens)


def gated_documents(
    q: Float[Array, "B T N H"],
    keys: tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]],
    q_tokens: Tokens,
    k_tokens: Tokens,
    gates: Float[Array, "B T N 2"],
    attend: Callable[..., tuple[jax.Array, jax.Array]] = _attend,
) -> Float[Array, "B T N H"]:
    """The gated sum of both parts.

    gates: after the sigmoid, own part first. attend: (q, keys, q_tokens, k_tokens) -> (out, lse).
    """
    own, _ = attend(q, keys, _without_documents(q_tokens), _without_documents(k_tokens))
    in_tail = q_tokens.documents == TAIL
    in_document = k_tokens.documents > 0
    others, _ = attend(q, keys, _only(q_tokens, in_tail), _only(k_tokens, in_document))
    first, second = jnp.split(cleaned(gates).astype(own.dtype), 2, axis=-1)
    return marked(own * first + others * second, ~jnp.isfinite(gates).all(axis=-1))


def _without_documents(tokens: Tokens) -> Tokens:
    """The same tokens with the tail as a document of its own, which sees no other document."""
    number = jnp.iinfo(jnp.int32).max
    return dataclasses.replace(
        tokens, documents=jnp.where(tokens.documents == TAIL, number, tokens.documents)
    )


def _only(tokens: Tokens, which: jax.Array) -> Tokens:
    """The same tokens with all but ``which`` turned into padding."""
    return dataclasses.replace(tokens, segments=jnp.where(which, tokens.segments, 0))
