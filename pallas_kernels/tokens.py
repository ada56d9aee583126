"""Who sees whom: the one rule that every attention method, cache and kernel follows.

A token belongs to a segment (a packed sequence), to a branch of it (0 is the prompt that all
completions of a group share) and perhaps to a document. It sees the tokens of its segment that do
not come after it, on its own branch or in the prompt, in its own document or outside of any; the
tail, which follows the documents, sees them all.

Dimensions: B rows, T queries, S keys.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# The document number of tokens that see every document.
TAIL = -1
# The score of a key that must not be seen: finite, so that a row without any visible key stays
# finite.
MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """What decides who sees whom, int32 [B, T] each.

    segments: from 1; 0 is padding, which sees and is seen by nobody. branches: 0 for a prompt, from
    1 for what follows it in parallel. documents: 0 for tokens that all may see, from 1 for
    documents, TAIL for tokens that see all of them. order: a token sees none of a greater order;
    along what a token sees, orders are distinct. It counts the tokens of the sequence as the token
    sees it, and a document starts where no other document can reach, nor, where there is a window,
    what all may see before the documents, of which they would see unlike parts; it is not the
    position that RoPE rotates by, which documents may share. limits: None, or what keeps a branch
    that has copies of some of the prompt's keys from those keys: of a key, the order of the first
    token that it stands for; of a query, the order from which its branch has keys of its own. A
    branch sees none of the prompt's keys from there on.
    """

    segments: jax.Array
    branches: jax.Array
    documents: jax.Array
    order: jax.Array
    limits: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return self.segments.shape

    def map(self, function) -> Tokens:
        """The same function of every field."""
        return jax.tree.map(function, self)


def sequences(lengths: jax.Array, size: int) -> Tokens:
    """Rows that each hold one sequence of ``lengths`` [B] tokens from slot 0, padded to
    ``size``.
    """
    slots = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (lengths.shape[0], size))
    zeros = jnp.zeros_like(slots)
    return Tokens(
        segments=(slots < lengths[:, None]).astype(jnp.int32),
        branches=zeros,
        documents=zeros,
        order=slots,
    )


def packed_rows(segments: jax.Array, branches: jax.Array, positions: jax.Array) -> Tokens:
    """Packed rows of prompts and their completions; positions count from each prompt's start."""
    return Tokens(
        segments=segments, branches=branches, documents=jnp.zeros_like(segments), order=positions
    )


def visible(q: Tokens, k: Tokens, window: int | None = None) -> jax.Array:
    """bool [B, T, S], True where query t sees key s. window: most tokens back in order, the query's
    own counted.
    """
    return sees(q.map(lambda x: x[:, :, None]), k.map(lambda x: x[:, None, :]), window)


def sees(q: Tokens, k: Tokens, window: int | None = None) -> jax.Array:
    """``visible`` of fields that broadcast against each other, as kernels hold them."""
    mask = (q.segments == k.segments) & (k.segments > 0) & (k.order <= q.order)
    mask &= (k.branches == 0) | (k.branches == q.branches)
    mask &= (k.documents == 0) | (k.documents == q.documents) | (q.documents == TAIL)
    if k.limits is not None:
        mask &= (k.branches == q.branches) | (k.limits < q.limits)
    if window is not None:
        mask &= q.order - k.order < window
    return mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bounds:
    """Least and greatest value of each field of Tokens over the real tokens of a block, int32 [B,
    blocks] each.

    A block of nothing but padding has low > high.
    """

    low: Tokens
    high: Tokens


def bounds(tokens: Tokens, block: int) -> Bounds:
    """Bounds of consecutive blocks of ``block`` tokens; T must be a multiple of it."""
    real = tokens.segments > 0
    most = jnp.iinfo(jnp.int32).max

    def reduce(function, fill):
        return tokens.map(
            lambda x: function(
                jnp.where(real, x, fill).reshape(x.shape[0], x.shape[1] // block, block), axis=2
            )
        )

    return Bounds(low=reduce(jnp.min, most), high=reduce(jnp.max, -most))


def may_see(q: Bounds, k: Bounds, window: int | None = None) -> jax.Array:
    """bool [B, query blocks, key blocks], False only where by their bounds no query of one sees a
    key of the other.
    """
    q_low, q_high = (x.map(lambda y: y[:, :, None]) for x in (q.low, q.high))
    k_low, k_high = (x.map(lambda y: y[:, None, :]) for x in (k.low, k.high))

    def overlap(name: str) -> jax.Array:
        return (getattr(q_low, name) <= getattr(k_high, name)) & (
            getattr(k_low, name) <= getattr(q_high, name)
        )

    mask = overlap("segments") & (k_low.order <= q_high.order)
    mask &= (k_low.branches == 0) | overlap("branches")
    mask &= (
        (q_low.documents == TAIL)
        | ((k_low.documents <= 0) & (k_high.documents >= 0))
        | overlap("documents")
    )
    if k_low.limits is not None:
        mask &= overlap("branches") | (k_low.limits < q_high.limits)
    if window is not None:
        mask &= q_low.order - k_high.order < window
    return mask


def must_see(q: Bounds, k: Bounds, window: int | None = None) -> jax.Array:
    """bool as from ``may_see``, True only where by their bounds each query of one sees each key of
    the other.
    """
    q_low, q_high = (x.map(lambda y: y[:, :, None]) for x in (q.low, q.high))
    k_low, k_high = (x.map(lambda y: y[:, None, :]) for x in (k.low, k.high))

    def equal(name: str) -> jax.Array:
        low = getattr(q_low, name)
        return (
            (low == getattr(q_high, name))
            & (low == getattr(k_low, name))
            & (low == getattr(k_high, name))
        )

    mask = equal("segments") & (k_high.order <= q_low.order)
    mask &= ((k_low.branches == 0) & (k_high.branches == 0)) | equal("branches")
    mask &= (
        ((k_low.documents == 0) & (k_high.documents == 0))
        | (q_high.documents == TAIL)
        | equal("documents")
    )
    if k_low.limits is not None:
        mask &= equal("branches") | (k_high.limits < q_low.limits)
    if window is not None:
        mask &= q_high.order - k_low.order < window
    return mask
