"""The rule of who sees whom: the one that every attention method, cache and kernel follows.

A token belongs to a segment (a packed sequence), to a branch of the segment, and perhaps to a
document. It sees a token for which all of these hold:

- The other token is of the same segment and does not come after it.
- It is on the same branch, or on one that its branch continues.
- It is in the same document, or outside of any. The tail, which follows the documents, sees all.

The branches of a segment are the nodes of a tree of token runs: the root is what all share (the
prompt of a group), and a node continues its parent (a completion the prompt, a later context the
part of an earlier one that it keeps). Nodes are numbered depth first, so that a node and all that
continue it have consecutive numbers. Then a query in node q sees a key in node k exactly where

    first <= q <= last,    first = k, last = the highest number below k,

two comparisons at any depth (``branch_of``, ``nodes``).

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


# A branch holds the number of its node in this many low bits. The bits above them hold how many
# nodes continue it. With one integer for both, a kernel copies no more for each key than it would
# for one prompt with its completions.
_NODE_BITS = 16
# Most nodes of a segment: the number of those that continue a node must fit above its own number.
MAX_NODES = 2 ** (31 - _NODE_BITS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """The numbers that decide who sees whom, int32 [B, T] each."""

    # From 1; 0 is padding, which sees and is seen by nobody.
    segments: jax.Array
    # The node of the segment's tree, as ``branch_of`` makes it: 0 for the root, which the whole
    # segment sees, and plain numbers from 1 for nodes that no other continues.
    branches: jax.Array
    # 0 for tokens that all may see, from 1 for documents, TAIL for tokens that see all of them.
    documents: jax.Array
    # The place of a token in the sequence as the token sees it. A token sees no token of a greater
    # order, and no two tokens that it sees have the same order. A document therefore starts past
    # every order that another document can have. With a window it also starts so far on that its
    # tokens do not reach back to what all may see before the documents: each document would see a
    # different part of that. The order is not the position that RoPE rotates by, which documents
    # may share.
    order: jax.Array
    # None, or what keeps a branch from those keys of the root of which it has copies. For a key:
    # the order of the first token that it stands for. For a query: the order from which its branch
    # has keys of its own; it sees none of the root's keys from there on. Only for trees of two
    # levels.
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
    """Packed rows of trees of tokens; positions count from each root's start."""
    return Tokens(
        segments=segments, branches=branches, documents=jnp.zeros_like(segments), order=positions
    )


def branch_of(number: int, descendants: int) -> int:
    """The branch of a node by its number, depth first, and how many nodes continue it.

    Raises:
      ValueError: the tree has more nodes than a branch can tell apart.
    """
    if number + descendants >= MAX_NODES:
        raise ValueError(
            f"node {number} with {descendants} below it: a segment's tree may have {MAX_NODES} "
            "nodes"
        )
    # all of a segment sees its root anyway, which therefore needs no count
    return number | descendants << _NODE_BITS if number else 0


def nodes(tokens: Tokens) -> tuple[Tokens, jax.Array]:
    """(Tokens with the number of the node as branch, the highest number that sees the node)."""
    numbers = tokens.branches & (2**_NODE_BITS - 1)
    most = jnp.iinfo(jnp.int32).max
    last = jnp.where(numbers == 0, most, numbers + (tokens.branches >> _NODE_BITS))
    return dataclasses.replace(tokens, branches=numbers), last


def visible(q: Tokens, k: Tokens, window: int | None = None) -> jax.Array:
    """bool [B, T, S], True where query t sees key s.

    window: how many of the last tokens, by their order, a query sees, its own counted.
    """
    return sees(q.map(lambda x: x[:, :, None]), k.map(lambda x: x[:, None, :]), window)


def sees(q: Tokens, k: Tokens, window: int | None = None) -> jax.Array:
    """``visible`` of fields that broadcast against each other, as kernels hold them."""
    # what is worked out of a query or a key alone stands before anything is broadcast
    return sees_nodes(nodes(q)[0], *nodes(k), window)


def sees_nodes(q: Tokens, k: Tokens, last: jax.Array, window: int | None = None) -> jax.Array:
    """``sees`` of what ``nodes`` returns: q with numbers of nodes, (k, last) likewise."""
    mask = (q.segments == k.segments) & (k.segments > 0) & (k.order <= q.order)
    mask &= (k.branches <= q.branches) & (q.branches <= last)
    mask &= (k.documents == 0) | (k.documents == q.documents) | (q.documents == TAIL)
    if k.limits is not None:
        mask &= (k.branches == q.branches) | (k.limits < q.limits)
    if window is not None:
        mask &= q.order - k.order < window
    return mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bounds:
    """The least and the greatest value of each field of Tokens over the real tokens of a block.

    All are int32 [B, blocks]. For branches they are the numbers of the nodes. A block of nothing
    but padding has low > high.
    """

    low: Tokens
    high: Tokens
    # The highest node that sees any of the block's keys.
    last: jax.Array


def bounds(tokens: Tokens, block: int) -> Bounds:
    """Bounds of consecutive blocks of ``block`` tokens; T must be a multiple of it."""
    tokens, last = nodes(tokens)
    real = tokens.segments > 0
    most = jnp.iinfo(jnp.int32).max

    def reduce(function, fill, x):
        x = jnp.where(real, x, fill).reshape(x.shape[0], x.shape[1] // block, block)
        return function(x, axis=2)

    return Bounds(
        low=tokens.map(lambda x: reduce(jnp.min, most, x)),
        high=tokens.map(lambda x: reduce(jnp.max, -most, x)),
        last=reduce(jnp.max, -most, last),
    )


def may_see(q: Bounds, k: Bounds, window: int | None = None) -> jax.Array:
    """The blocks of keys that must be visited by which blocks of queries, by their bounds.

    Returns bool [B, query blocks, key blocks]: False only where certainly no query of the one sees
    a key of the other.
    """
    q_low, q_high = (x.map(lambda y: y[:, :, None]) for x in (q.low, q.high))
    k_low, k_high = (x.map(lambda y: y[:, None, :]) for x in (k.low, k.high))

    def overlap(name: str) -> jax.Array:
        return (getattr(q_low, name) <= getattr(k_high, name)) & (
            getattr(k_low, name) <= getattr(q_high, name)
        )

    mask = overlap("segments") & (k_low.order <= q_high.order)
    mask &= (k_low.branches <= q_high.branches) & (q_low.branches <= k.last[:, None, :])
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
    """The blocks that need no mask, by their bounds.

    Returns bool [B, query blocks, key blocks]: True only where certainly every query of the one
    sees every key of the other. It says nothing about padding.
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
    # keys of one node, and only queries that see it
    one = k_low.branches == k_high.branches
    last = k.last[:, None, :]
    mask &= one & (k_high.branches <= q_low.branches) & (q_high.branches <= last)
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
