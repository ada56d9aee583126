"""The model over a cache in tiers: chunks of prompts, and single tokens, with a history that does
not fit on the device.

All layers have the same method, which chooses pages before it reads them. The host goes through the
layers one by one, since it has to bring the chosen blocks between the two halves of a layer's
attention. The rest are a few programs, which are the same for every layer and are compiled once for
each shape of tokens.

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
from models.functions import rope
from models.model_config import ModelConfig
from models.paged import new_keys
from models.transformer import Transformer, abstract_model


class TieredModel:
    """A model and its cache.

    A history of documents, from ``paged.document_encoder``, goes into ``cache.load``.

    directory: for the blocks on disk. sizes: the fields of ``TierConfig`` that do not follow from
    the model. Raises ValueError unless all layers have the same method, one that chooses pages.
    """

    def __init__(
        self, model: Transformer, directory: Path, *, dtype: str | None = None, **sizes: int
    ):
        c = model.config
        method, *others = set(c.attention)
        if others or not method.chooses_pages:
            raise ValueError(
                f"attention={c.attention}: a cache in tiers needs one method in every layer, "
                "and one that chooses pages before it reads them, such as NSA"
            )
        shapes = dict(
            layers=c.num_layers,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            dtype=dtype or c.dtype,
        )
        self._before, self._after, rotate = _programs(c)
        self.cache = TieredCache(method, TierConfig(**shapes, **sizes), directory, rotate)
        self._model = model
        self._layers = model.unstacked()

    def forward(self, tokens: np.ndarray, places: np.ndarray) -> Float[Array, "B T D"]:
        """Final hidden states of new tokens, which the cache holds afterwards.

        tokens, places: int32 [B, T], T at most the cache's chunk. Places are consecutive in a row,
        then -1 for padding; all places before them must have been written. Raises ValueError as
        ``TieredCache.step`` does.
        """
        x = _embed(self._model, tokens)
        for index, (layer, parameters) in enumerate(self._layers):
            q, new, inputs = self._before(layer, parameters, x, places)
            out = self.cache.step(index, q, new, places, inputs, parameters)
            x = self._after(layer, x, out, places)
        return _finish(self._model, x)


@functools.cache
def _programs(config: ModelConfig) -> tuple[Callable, ...]:
    """(a layer before its attention, a layer after it, the rotation of keys), for a config."""
    # the model gives only the code: a layer's parameters come as arguments
    model = abstract_model(config)
    method = config.attention[0]

    def before(layer, parameters, x, places):
        y = model.before_attention(layer, x)
        return new_keys(model, method, parameters, layer, y, places, rotated=True)

    def after(layer, x, attended, places):
        return model.after_attention(layer, x, attended, places >= 0)[0]

    return (
        jax.jit(before),
        jax.jit(after),
        functools.partial(rope, config=config),
    )


_embed = jax.jit(Transformer.embed_tokens)
_finish = jax.jit(Transformer.finish)
