"""The model over a paged cache: prompts in chunks, one token or several at a time, decoding in a
loop, and documents.

Dimensions: B rows, T tokens, D model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.cache import view
from attention.cache.documents import DocumentKV, encode_document, fingerprint_weights
from attention.cache.paged import NewKeys, PagedCache, Tables, init_cache, page_size, write
from attention.cache.paged_attention import Pages, attend, sequence_pages
from attention.methods import Dense, Method
from attention.nsa import NSA
from models.transformer import (
    DocumentGates,
    Layers,
    ModelConfig,
    NSALayers,
    Transformer,
    compress_keys,
    gates,
    rope,
)


def model_cache(
    config: ModelConfig,
    num_pages: int,
    dtype=None,
    *,
    page: int | None = None,
    rotated: bool = True,
) -> PagedCache:
    """An empty cache for a model; arguments as ``init_cache``."""
    methods = _methods(config)
    heads = config.num_kv_heads
    size = config.head_dim
    return init_cache(
        methods, num_pages, heads, size, dtype or config.dtype, page=page, rotated=rotated
    )


def document_encoder(
    model: Transformer, *, page: int | None = None
) -> Callable[[Sequence[int]], DocumentKV]:
    """What encodes a document, for any cache of this model; it is compiled once for each number of
    pages.
    """
    methods = _methods(model.config)
    weights = fingerprint_weights(model, repr(model.config))
    keys_of = functools.partial(_keys_values, model)
    return lambda tokens: encode_document(
        keys_of, methods, tokens, weights, page_size(methods, page)
    )


def _methods(config: ModelConfig) -> tuple[Method, ...]:
    """Of every layer."""
    return config.attention * (config.num_layers // len(config.attention))


_keys_values = jax.jit(lambda model, tokens, where: model.keys_values(tokens, where.order, where))


def forward(
    model: Transformer,
    cache: PagedCache,
    tokens: Int[Array, "B T"],
    places: Int[Array, "B T"],
    pages: Pages,
) -> tuple[Float[Array, "B T D"], PagedCache]:
    """(final hidden states, the cache with the tokens in it).

    places: of the tokens, consecutive in a row, then -1 for padding; all places before must have
    been written. pages: the rows with these tokens in them.
    """
    seen, positions = pages.at(places)
    rotate = functools.partial(rope, config=model.config)
    x = model.embed_tokens(tokens)
    for index, (method, (layer, extra)) in enumerate(
        zip(cache.methods, model.unstacked(), strict=True)
    ):

        def attention(layer, y, index=index, method=method, extra=extra):
            nonlocal cache
            q, new, parts = new_keys(model, layer, extra, y, positions, cache.rotated)
            compress = (
                functools.partial(compress_keys, extra, method) if isinstance(method, NSA) else None
            )
            cache = write(cache, index, pages.tables, places, new, compress=compress, rotate=rotate)
            return attend(cache, index, q, seen, pages, gates=parts, rotate=rotate)

        x = model.block(layer, x, attention)
    return model.finish(x), cache


def decode_token(
    model: Transformer,
    cache: PagedCache,
    views: dict[int, view.LayerView],
    rows: view.Rows,
    tables: Int[Array, "B P"],
    tokens: Int[Array, " B"],
    places: Int[Array, " B"],
    layers: Sequence[tuple[Layers, NSALayers | DocumentGates | None]] | None = None,
) -> tuple[Float[Array, "B D"], PagedCache, dict[int, view.LayerView]]:
    """One token of every row: (final hidden states, the cache and the views with the token in
    them).

    views: of the layers, from ``gather_views``, that do not read their pages; their new keys stay
    in the view until ``put_views_back``. rows: the view's. tables: all pages of the rows. places:
    -1 for rows that are over. layers: the model's, unstacked, where that costs a copy which several
    tokens can share.
    """
    pages = (
        sequence_pages(tables, places + 1, cache.page) if len(views) < len(cache.methods) else None
    )
    positions = jnp.maximum(places, 0)[:, None]
    seen = pages.at(places[:, None])[0] if pages else None
    rotate = functools.partial(rope, config=model.config)
    x = model.embed_tokens(tokens[:, None])
    views = dict(views)
    for index, (method, (layer, extra)) in enumerate(
        zip(cache.methods, layers or model.unstacked(), strict=True)
    ):

        def attention(layer, y, index=index, method=method, extra=extra):
            nonlocal cache
            q, new, parts = new_keys(model, layer, extra, y, positions, cache.rotated)
            if index in views:
                views[index] = view.write(
                    views[index], rows, places, tuple(k[:, 0] for k in new.main)
                )
                return view.attend(views[index], rows, q[:, 0], places)[:, None]
            compress = (
                functools.partial(compress_keys, extra, method) if isinstance(method, NSA) else None
            )
            cache = write(
                cache,
                index,
                Tables.same(tables),
                places[:, None],
                new,
                compress=compress,
                rotate=rotate,
            )
            return attend(cache, index, q, seen, pages, gates=parts, rotate=rotate)

        x = model.block(layer, x, attention)
    return model.finish(x)[:, 0], cache, views


def gather_views(
    cache: PagedCache, rows: view.Rows, block: int, reach: Int[Array, ""]
) -> dict[int, view.LayerView]:
    """The views of all dense layers; arguments as ``view.gather``."""
    dense = [index for index, method in enumerate(cache.methods) if isinstance(method, Dense)]
    return {index: view.gather(cache, index, rows, block, reach) for index in dense}


def put_views_back(
    cache: PagedCache, views: dict[int, view.LayerView], rows: view.Rows, firsts, counts, steps: int
):
    """The cache with what was decoded into the views; arguments as ``view.put_back``."""
    for index, own in views.items():
        cache = view.put_back(cache, index, own, rows, firsts, counts, steps)
    return cache


def new_keys(
    model: Transformer,
    layer: Layers,
    extra: NSALayers | DocumentGates | None,
    y: Float[Array, "B T D"],
    positions,
    rotated: bool,
) -> tuple[Float[Array, "B T N H"], NewKeys, Float[Array, "B T N parts"] | None]:
    """(q rotated, what a layer writes for new tokens, the gates of a layer that has some).

    y: as ``Transformer.before_attention`` gives them. extra: as from ``of_period``. rotated: of the
    cache.
    """
    q, k, v = model.qkv(layer, y)
    turn = functools.partial(rope, positions=positions, config=model.config)
    keep = turn if rotated else lambda k: k
    parts = gates(extra, y) if extra else None
    if not isinstance(extra, NSALayers):
        return turn(q), NewKeys((keep(k), v)), parts
    raw, (wk, wv) = model.nsa_keys(layer, extra, y)
    return turn(q), NewKeys((keep(k), v), raw, (keep(wk), wv)), parts
