"""Single keys that each query chooses by the scores of an indexer, and attention to them in latent
form (DSA; DeepSeek-V3.2's report, equations 1 to 4).

The score of a key s for a query t is

    I(t, s) = sum over heads h of w_h(t) relu(q_h(t) . k(s) d^-1/2) h^-1/2

with one key for all heads of the indexer. A query attends to the keys of the greatest scores among
those that it sees. The indexer learns from attention alone: its loss is the divergence of the
softmax of its scores from the weights of attention, summed over heads and normalised, over the keys
that were chosen. Nothing else reaches it, and its loss reaches nothing else.

Queries go in chunks, each of which has the chosen keys of its queries side by side. There is then
never an array of all scores. The kernels of chosen blocks (``selected``) do not serve: they read
blocks of keys that queries share, where here every query has its own single keys.

Dimensions: B rows, T queries, S places of keys, N query heads, E elements of a latent key, of which
the first R are its value, I heads of the indexer, D elements of one, n picks, C queries of a chunk.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.picks import agreement
from attention.ring import Ring
from pallas_kernels.finite import cleaned, marked
from pallas_kernels.tokens import MASKED, Tokens, visible

# About how many numbers a chunk of queries has in memory together.
CHUNK = 2**25
_MOST = jnp.iinfo(jnp.int32).max


class Scoring(NamedTuple):
    """Queries, keys and weights that an indexer makes of tokens."""

    # q, rotated.
    queries: Float[Array, "B T I D"]
    # k, one for all heads, rotated.
    keys: Float[Array, "B S 1 D"]
    # w, the weights of heads.
    weights: Float[Array, "B T I 1"]


def scores(
    queries: Float[Array, "C I D"], keys: jax.Array, weights: Float[Array, "C I"]
) -> jax.Array:
    """I(t, s) in float32 or wider, [C, n], of keys [n, D], or of each query's own [C, n, D]."""
    wide = jnp.promote_types(jnp.float32, queries.dtype)
    spec = "CID,nD->CIn" if keys.ndim == 2 else "CID,CnD->CIn"
    found = jnp.einsum(spec, queries, keys, preferred_element_type=wide)
    found = jax.nn.relu(found * queries.shape[-1] ** -0.5)
    of_heads = weights.astype(wide) * weights.shape[-1] ** -0.5
    return jnp.einsum("CIn,CI->Cn", found, of_heads)


def choose(found: Scoring, q_tokens: Tokens, k_tokens: Tokens, count: int) -> Int[Array, "B T n"]:
    """The places of the ``count`` best keys of every query, in order, -1 where it sees fewer.

    Of equal scores the first place is taken. No gradient passes. A score that is not finite counts
    as the best, so that who sees such a key gets to know it.
    """

    def row(xs):
        queries, keys, weights, q_row, k_row = xs
        tokens = k_row.map(lambda x: x[None])

        def chunk(xs):
            queries, weights, q_chunk = xs
            mask = visible(q_chunk.map(lambda x: x[None]), tokens)[0]
            ranked = scores(queries, keys[:, 0], weights[..., 0])
            ranked = jnp.where(jnp.isfinite(ranked), ranked, jnp.inf)
            ranked = jnp.where(mask, ranked, -jnp.inf)
            return best_places(ranked, count)

        each = keys.shape[0] * (queries.shape[1] + 1)
        return _by_chunks(chunk, (queries, weights, q_row), each)

    return jax.lax.map(row, jax.lax.stop_gradient((*found, q_tokens, k_tokens)))


def best_places(ranked: Float[Array, "C n"], count: int) -> Int[Array, "C count"]:
    """The places of the ``count`` greatest numbers of each row, in order, -1 where fewer are above
    -inf. Of equal numbers the first place is taken.

    The smallest of them is found bit by bit: on CPU ``top_k`` and a sort of the places take 2.5
    times as long for 2,048 of 4,096 numbers.
    """
    bits = jnp.finfo(ranked.dtype).bits
    unsigned = jnp.dtype(f"uint{bits}")
    # whole numbers in the same order, in which 0 and -0 are equal
    number = jax.lax.bitcast_convert_type(jnp.where(ranked == 0, 0.0, ranked), unsigned)
    top = jnp.array(1 << (bits - 1), unsigned)
    number = jnp.where(number & top, ~number, number | top)

    def one(step, smallest):
        tried = smallest | (top >> step.astype(unsigned))
        enough = jnp.sum(number >= tried[:, None], axis=-1) >= count
        return jnp.where(enough, tried, smallest)

    smallest = jax.lax.fori_loop(0, bits, one, jnp.zeros(ranked.shape[0], unsigned))[:, None]
    greater = number > smallest
    left = count - jnp.sum(greater, axis=-1, keepdims=True)
    equal = number == smallest
    chosen = greater | (equal & (jnp.cumsum(equal, axis=-1) <= left))
    chosen &= ranked > -jnp.inf
    # the place at which so many have been chosen
    so_far = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, count + 1, dtype=jnp.int32)
    places = jax.vmap(lambda row: jnp.searchsorted(row, wanted))(so_far)
    return jnp.where(places == ranked.shape[1], -1, places.astype(jnp.int32))


def attend_chosen(
    q: Float[Array, "B T N E"],
    latent: Float[Array, "B S E"],
    picks: Int[Array, "B T n"],
    rank: int,
    found: Scoring | None,
    over: tuple[str, ...],
) -> tuple[Float[Array, "B T N R"], Float[Array, "B T"]]:
    """(Attention to chosen keys, the divergence of each query: ``Indexed.loss``).

    latent: keys, whose first ``rank`` elements are their values; scores are scaled by 1/sqrt(E).
    found: for the divergence; None for 0. over: the mesh axes over which heads are cut.
    """

    def row(xs):
        return _row(rank, over, *xs)

    return jax.lax.map(row, (q, latent, picks, found))


def gathered(
    q: Float[Array, "B T N E"],
    keys: Float[Array, "B T n E"],
    picks: Int[Array, "B T n"],
    rank: int,
) -> Float[Array, "B T N R"]:
    """Attention of few queries to keys that lie side by side; ``picks`` -1 for none."""
    each = jax.vmap(functools.partial(_attend, rank, ()))
    return each(q, keys, picks >= 0, None)[0]


def _attend(
    rank: int,
    over: tuple[str, ...],
    q: Float[Array, "C N E"],
    keys: Float[Array, "C n E"],
    real: jax.Array,
    found: tuple | None,
) -> tuple[Float[Array, "C N R"], Float[Array, " C"]]:
    """A chunk of ``attend_chosen``. found: (queries, weights, the keys' own [C, n, D])."""
    wide = jnp.promote_types(jnp.float32, q.dtype)
    keys = jnp.where(real[..., None], keys, 0)
    products = jnp.einsum("CNE,CnE->CNn", q, keys, preferred_element_type=wide)
    products = jnp.where(real[:, None], products * q.shape[-1] ** -0.5, MASKED)
    weights = jnp.where(real[:, None], jax.nn.softmax(products), 0.0)
    out = jnp.einsum(
        "CNn,CnR->CNR", weights.astype(keys.dtype), keys[..., :rank], preferred_element_type=wide
    )
    if found is None:
        return out.astype(q.dtype), jnp.zeros(q.shape[0], wide)
    queries, of_heads, own = found
    ranked = scores(queries, jnp.where(real[..., None], own, 0), of_heads)
    return out.astype(q.dtype), divergence(jnp.sum(weights, axis=1), ranked, real, over)


def divergence(
    wanted: Float[Array, "C n"], ranked: Float[Array, "C n"], real: jax.Array, over: tuple[str, ...]
) -> Float[Array, " C"]:
    """KL(weights of attention || softmax of scores) of each query, without a gradient through the
    weights; 0 for a query that sees nothing.

    wanted: the sum of the weights over the heads that this device has.
    """
    wanted = jax.lax.stop_gradient(wanted)
    wanted = jax.lax.psum(wanted, over) if over else wanted
    total = jnp.sum(wanted, axis=-1, keepdims=True)
    share = wanted / jnp.where(total > 0, total, 1.0)
    log_scores = jax.nn.log_softmax(jnp.where(real, ranked, MASKED))
    logs = jnp.log(jnp.where(share > 0, share, 1.0))
    return jnp.sum(jnp.where(share > 0, share * (logs - log_scores), 0.0), axis=-1)


# --- One row, in chunks --------------------------------------------------------------------------


def _by_chunks(chunk, xs, each: int):
    """The results of a function of chunks of queries, side by side.

    xs: a pytree of [T, ...]. each: numbers that one query has in memory.
    """
    count = jax.tree.leaves(xs)[0].shape[0]
    size = max(1, min(count, CHUNK // each))
    found = jax.lax.map(chunk, _cut(xs, size))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], found)


def _cut(xs, size: int):
    """[T, ...] in chunks [chunks, size, ...], with zeros behind the last."""

    def one(x):
        more = -x.shape[0] % size
        x = jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(-1, size, *x.shape[1:])

    return jax.tree.map(one, xs)


def _size(q, picks, found) -> int:
    """Queries of a chunk."""
    heads, element = q.shape[1:]
    each = picks.shape[-1] * (element + heads)
    if found is not None:
        each += picks.shape[-1] * (found.keys.shape[-1] + found.queries.shape[1])
    return max(1, min(q.shape[0], CHUNK // each))


def _parts(q, picks, found):
    """Each chunk's own queries, picks counted from 1 (0 for none), and queries and weights of the
    indexer.
    """
    picks = jnp.where(picks < 0, -1, picks) + 1  # so that the zeros of ``_cut`` are none
    size = _size(q, picks, found)
    own = () if found is None else (found.queries, found.weights[..., 0])
    return _cut((q, picks, own), size)


def _at(picks, latent, found):
    """(the latent keys of a chunk's picks, the indexer's), and the places that these are at."""
    at = jnp.maximum(picks - 1, 0)
    return at, latent[at], () if found is None else (found.keys[:, 0][at],)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _row(rank, over, q, latent, picks, found):
    """``attend_chosen`` of one row."""

    def chunk(xs):
        q, picks, own = xs
        _, keys, more = _at(picks, latent, found)
        return _attend(rank, over, q, keys, picks > 0, (*own, *more) or None)

    out = jax.lax.map(chunk, _parts(q, picks, found))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: q.shape[0]], out)


def _row_forward(rank, over, q, latent, picks, found):
    return _row(rank, over, q, latent, picks, found), (q, latent, picks, found)


def _row_backward(rank, over, residuals, cotangents):
    q, latent, picks, found = residuals
    wide = jnp.promote_types(jnp.float32, q.dtype)
    parts = _parts(q, picks, found)
    size = parts[0].shape[1]

    # those of keys are carried from chunk to chunk; those of queries are complete with each
    def chunk(sums, xs):
        (q, picks, own), given = xs
        at, keys, more = _at(picks, latent, found)

        def again(q, keys, own, more):
            return _attend(rank, over, q, keys, picks > 0, (*own, *more) or None)

        _, pull = jax.vjp(again, q, keys, own, more)
        dq, d_keys, d_own, d_more = pull(given)
        real = (picks > 0)[..., None]
        # what is not there is at place 0
        sums = tuple(
            x.at[at].add(jnp.where(real, d, 0).astype(wide))
            for x, d in zip(sums, (d_keys, *d_more), strict=True)
        )
        return sums, (dq, d_own)

    start = [jnp.zeros(latent.shape, wide)]
    if found is not None:
        start.append(jnp.zeros(found.keys[:, 0].shape, wide))
    sums, (dq, d_own) = jax.lax.scan(chunk, tuple(start), (parts, _cut(cotangents, size)))
    dq, d_own = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: q.shape[0]], (dq, d_own))
    d_found = None
    if found is not None:
        keys = sums[1][:, None].astype(found.keys.dtype)
        d_found = Scoring(d_own[0], keys, d_own[1][..., None])
    return dq, sums[0].astype(latent.dtype), None, d_found


_row.defvjp(_row_forward, _row_backward)


# --- All keys ------------------------------------------------------------------------------------


def attend_all(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N H"],
    found: Scoring,
    q_tokens: Tokens,
    k_tokens: Tokens,
    over: tuple[str, ...],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T"]]:
    """``attend_chosen`` where every query attends to all that it sees, in the expanded form."""

    def row(xs):
        q, k, v, found, q_row, k_row = xs
        tokens = k_row.map(lambda x: x[None])
        bad = ~jnp.isfinite(k).all((1, 2)) | ~jnp.isfinite(v).all((1, 2))
        k, v, own = (cleaned(x) for x in (k, v, found.keys[:, 0]))

        @jax.checkpoint
        def chunk(xs):
            q, queries, of_heads, q_chunk = xs
            mask = visible(q_chunk.map(lambda x: x[None]), tokens)[0]
            wide = jnp.promote_types(jnp.float32, q.dtype)
            products = jnp.einsum("CNH,SNH->CNS", q, k, preferred_element_type=wide)
            products = jnp.where(mask[:, None], products * q.shape[-1] ** -0.5, MASKED)
            weights = jnp.where(mask[:, None], jax.nn.softmax(products), 0.0)
            out = jnp.einsum(
                "CNS,SNH->CNH", weights.astype(v.dtype), v, preferred_element_type=wide
            )
            loss = divergence(jnp.sum(weights, axis=1), scores(queries, own, of_heads), mask, over)
            out = marked(out, (mask & bad).any(-1)[:, None])
            return out.astype(q.dtype), loss

        each = k.shape[0] * (2 * q.shape[1] + found.queries.shape[1])
        return _by_chunks(chunk, (q, found.queries, found.weights[..., 0], q_row), each)

    return jax.lax.map(row, (q, k, v, found, q_tokens, k_tokens))


# --- The choice of a sampler ---------------------------------------------------------------------


def with_noted(
    own: Int[Array, "B T n"],
    q_tokens: Tokens,
    k_tokens: Tokens,
    noted: Int[Array, "B M n"],
    sources: Int[Array, "B M"],
    replay: bool,
    ring: Ring | None,
) -> tuple[Int[Array, "B T n"], Float[Array, "B M 1 2"]]:
    """(The picks that queries attend to, how a layer's own agree with a sampler's: ``agreement``).

    own: of this device's queries, ``q_tokens``. noted: numbers of tokens by order, -1 for none, of
    the queries at ``sources``, slots of whole rows.
    """
    count = own.shape[1]
    first = 0 if ring is None else jax.lax.axis_index(ring.axis) * count
    at = sources - first
    here = (at >= 0) & (at < count)
    inside = jnp.clip(at, 0, count - 1)
    asking = q_tokens.map(lambda x: jnp.take_along_axis(x, inside, axis=1))
    given = _placed(asking, k_tokens, noted)
    mine = jnp.take_along_axis(own, inside[..., None], axis=1)
    shares = agreement(mine[:, :, None], given[:, :, None])
    shares = jnp.where(here[..., None, None], shares, 0.0)
    if ring is not None:
        shares = jax.lax.psum(shares, ring.axis)
    if replay:
        # past the last slot, where nothing is written
        at = jnp.where(here & jnp.any(given >= 0, axis=-1), at, count)
        own = own.at[jnp.arange(own.shape[0])[:, None], at].set(given, mode="drop")
    return own, shares


def _placed(q_tokens: Tokens, k_tokens: Tokens, noted: Int[Array, "B M n"]) -> Int[Array, "B M n"]:
    """Tokens by order as the slots of those that the queries see; -1 for none."""

    def row(xs):
        q_row, k_row, noted = xs
        tokens = k_row.map(lambda x: x[None])

        def chunk(xs):
            q_chunk, noted = xs
            mask = visible(q_chunk.map(lambda x: x[None]), tokens)[0]
            # no two tokens that a query sees have the same order
            orders = jnp.where(mask, k_row.order, _MOST)
            slots = jnp.argsort(orders, axis=-1)
            orders = jnp.take_along_axis(orders, slots, axis=-1)
            at = jax.vmap(jnp.searchsorted)(orders, noted)
            at = jnp.minimum(at, orders.shape[-1] - 1)
            there = jnp.take_along_axis(orders, at, axis=-1) == noted
            return jnp.where(there & (noted >= 0), jnp.take_along_axis(slots, at, axis=-1), -1)

        return _by_chunks(chunk, (q_row, noted), 4 * k_row.order.shape[0])

    return jax.lax.map(row, (q_tokens, k_tokens, noted))
