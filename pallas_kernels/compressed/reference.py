"""The selection of blocks, written as its definition, with every probability in memory.

Runs in float64 too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.compressed.blocks import FORCED, UNSEEN, Selection, edges
from pallas_kernels.softmax import weighted_attention
from pallas_kernels.tokens import Tokens, visible


def scores(
    q: jax.Array,
    k: jax.Array,
    lse: jax.Array,
    q_tokens: Tokens,
    k_tokens: Tokens,
    heads: Tokens,
    shadows: jax.Array | None,
    *,
    selection: Selection,
    ahead: int = 0,
) -> jax.Array:
    """The scores that rank the blocks, [B, T, K, J] in float32 or wider; some are UNSEEN or FORCED.

    q: [B, T, N, H]. k: the compressed keys [B, E, K, H]. lse: [B, T, N], of the attention of q to
    k. The three Tokens must have limits. ahead: as for ``api.compressed_attention``.
    """
    batch, length, num_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    count = heads.shape[1]
    wide = jnp.promote_types(jnp.float32, q.dtype)
    q, lse = (x.reshape(batch, length, kv_heads, num_heads // kv_heads, -1) for x in (q, lse))
    logits = jnp.einsum("btkgh,bekh->btkge", q, k, preferred_element_type=wide, precision="highest")
    mask = visible(q_tokens, k_tokens)[:, :, None, None]
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, logits * head_dim**-0.5 - lse, 0.0)), 0.0)
    starts = (jnp.arange(k.shape[1])[:, None] - ahead) * selection.stride
    firsts = jnp.arange(count) * selection.block
    ends = jnp.minimum(starts + selection.length, firsts + selection.block)
    shares = jnp.maximum(ends - jnp.maximum(starts, firsts), 0) // selection.stride  # [E, J]
    found = jnp.einsum("btkge,ej->btkj", weights, shares.astype(wide), precision="highest")
    if shadows is not None:
        shadows = shadows[:, None, None]
        copied = jnp.take_along_axis(found, jnp.maximum(shadows, 0), axis=-1)
        found += jnp.where(shadows >= 0, copied, 0.0)
    early, late = (x[:, :, None] for x in edges(q_tokens, heads, selection))
    order = heads.order[:, None]
    found = jnp.where(((order < early) | (order >= late))[:, :, None], FORCED, found)
    return jnp.where(visible(q_tokens, heads)[:, :, None], found, UNSEEN)


def select(*arguments, selection: Selection, ahead: int = 0) -> jax.Array:
    """Numbers of the best blocks, int32 [B, T, K, n], -1 where fewer are seen.

    Ties go to the lower number. Arguments as for ``scores``.
    """
    ranked = scores(*arguments, selection=selection, ahead=ahead)
    order = jnp.argsort(-ranked, axis=-1, stable=True)[..., : selection.picks].astype(jnp.int32)
    picks = jnp.where(jnp.take_along_axis(ranked, order, axis=-1) >= 0, order, -1)
    return jnp.pad(
        picks, ((0, 0),) * 3 + ((0, selection.picks - picks.shape[-1]),), constant_values=-1
    )


def paged(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    last: jax.Array,
    real: jax.Array,
    *,
    first: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``paged.paged_compressed_attention`` with a row's pages side by side."""
    k, v = (x[jnp.maximum(table, 0)].transpose(0, 1, 3, 2, 4) for x in (k_pages, v_pages))
    k, v = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (k, v))
    number = jnp.arange(k.shape[1])
    mask = (number >= first) & (number <= last[..., None]) & real[:, None]
    out, lse, weights, share = weighted_attention(q, k, v, mask)
    return out, lse, jnp.einsum("bkgte,bkgt->bkte", weights, share)
