"""The model over a cache in tiers: prompts in chunks and single tokens against a history that the
device does not hold.

All layers are NSA. The host goes through the layers, since between the two halves of a layer's
attention it brings the blocks that were chosen; the rest are a few programs, the same for every
layer and compiled once for a shape of tokens.

Dimensions: B rows, T tokens, D model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float

from attention.cache.tiers import TierConfig, TieredCache
from attention.nsa import NSA
from models.paged import new_keys
from models.transformer import ModelConfig, Transformer, abstract_model, compress_keys, rope


class TieredModel:
    """A model and its cache. Raises ValueError unless all layers are NSA.

    directory: for the blocks on disk. sizes: those of ``TierConfig`` that the model does not fix. A
    history of documents, from ``paged.document_encoder``, goes into ``cache.load``.
    """

    def __init__(
        self, model: Transformer, directory: Path, *, dtype: str | None = None, **sizes: int
    ):
        c = model.config
        method, *others = set(c.attention)
        if others or not isinstance(method, NSA):
            raise ValueError(f"attention={c.attention}: a cache in tiers needs NSA in every layer")
        shapes = dict(
            layers=c.num_layers,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            dtype=dtype or c.dtype,
        )
        self._before, self._after, compress, rotate = _programs(c)
        self.cache = TieredCache(method, TierConfig(**shapes, **sizes), directory, compress, rotate)
        self._model = model
        self._layers = model.unstacked()

    def forward(self, tokens: np.ndarray, places: np.ndarray) -> Float[Array, "B T D"]:
        """Final hidden states of new tokens, which the cache holds afterwards.

        tokens, places: int32 [B, T], T at most the cache's chunk; places are consecutive in a row,
        then -1 for padding, and those before must have been written. Raises ValueError as
        ``TieredCache.step``.
        """
        x = _embed(self._model, tokens)
        for index, (layer, nsa) in enumerate(self._layers):
            q, new, gates = self._before(layer, nsa, x, places)
            x = self._after(layer, x, self.cache.step(index, q, new, places, gates, nsa))
        return _finish(self._model, x)


@functools.cache
def _programs(config: ModelConfig) -> tuple[Callable, ...]:
    """A layer before and after its attention, and what the cache compresses and rotates by; one for
    a config.
    """
    # a layer's parameters come as arguments
    model = abstract_model(config)
    method = config.attention[0]

    def before(layer, nsa, x, places):
        return new_keys(model, layer, nsa, model.before_attention(layer, x), places, rotated=True)

    def compress(nsa, k, v):
        return compress_keys(nsa, method, k, v)

    return (
        jax.jit(before),
        jax.jit(model.after_attention),
        compress,
        functools.partial(rope, config=config),
    )


_embed = jax.jit(Transformer.embed_tokens)
_finish = jax.jit(Transformer.finish)
