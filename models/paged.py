"""The model over a paged cache: one function for prompts in chunks, for one token and for several, and documents.

Dimensions: B rows, T tokens, D model.
"""

from __future__ import annotations

import functools

from jaxtyping import Array, Float, Int

from attention.cache.paged import NewKeys, PagedCache, init_cache, write
from attention.cache.paged_attention import Pages, attend
from attention.nsa import NSA
from models.transformer import ModelConfig, Transformer, compress_keys, gates, rope


def model_cache(
    config: ModelConfig, num_pages: int, dtype=None, *, page: int | None = None, rotated: bool = True
) -> PagedCache:
    """An empty cache for a model; arguments as ``init_cache``."""
    methods = config.attention * (config.num_layers // len(config.attention))
    heads, size = config.num_kv_heads, config.head_dim
    return init_cache(methods, num_pages, heads, size, dtype or config.dtype, page=page, rotated=rotated)


def forward(
    model: Transformer, cache: PagedCache, tokens: Int[Array, "B T"], places: Int[Array, "B T"], pages: Pages
) -> tuple[Float[Array, "B T D"], PagedCache]:
    """(final hidden states, the cache with the tokens in it).

    places: of the tokens, consecutive in a row, then -1 for padding; all places before must have been written.
    pages: the rows with these tokens in them.
    """
    seen, positions = pages.at(places)
    rotate = functools.partial(rope, config=model.config)
    x = model.embed_tokens(tokens)
    stacked = model.stacked()
    for index, method in enumerate(cache.methods):
        layer, extra = model.of_period(stacked, index)

        def attention(layer, y, index=index, method=method, extra=extra):
            nonlocal cache
            q, k, v = model.qkv(layer, y)
            keep = functools.partial(rotate, positions=positions) if cache.rotated else lambda k: k
            new, compress = NewKeys((keep(k), v)), None
            if isinstance(method, NSA):
                raw, (wk, wv) = model.nsa_keys(layer, extra, y)
                new = NewKeys((keep(k), v), raw, (keep(wk), wv))
                compress = functools.partial(compress_keys, extra, method)
            cache = write(cache, index, pages.tables, places, new, compress=compress, rotate=rotate)
            parts = gates(extra, y) if extra else None
            return attend(cache, index, rotate(q, positions), seen, pages, gates=parts, rotate=rotate)

        x = model.block(layer, x, attention)
    return model.finish(x), cache
