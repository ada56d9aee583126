"""Costs of the layers' attention, by arithmetic: operations, bytes of pages that are kept and read.

Every method of attention says how many elements a query multiplies (``Method.query_cost``) and how
many bytes a token reads (``Method.decode_bytes``). Here these are added over the layers of a model
and averaged over the queries of a row.
"""

from __future__ import annotations

import statistics

from attention.methods.method import QueryCost
from models.model_config import ModelConfig

# Lengths of a row at which costs that a number of keys caps are averaged. The mean of a cap
# anywhere in the row is exact to 1 / (8 * 64^2) of the row, and that of a cost without cap exact.
_POINTS = 64


def forward_passes(model: ModelConfig) -> float:
    """Times that an update computes a result that no gradient passes through: forward, and once
    more where ``remat`` does it again.
    """
    return 1.0 + (model.remat and model.remat_keeps == "nothing")


def kernel_passes(model: ModelConfig) -> float:
    """Operations of attention in an update, in those of its forward pass: two products forward and
    seven backward (dk and dv: scores, and one each for their gradient and the two results; dq:
    scores, their gradient, and the result), and two more where they are done again.
    """
    return 3.5 + forward_passes(model)


def chosen_passes(model: ModelConfig) -> float:
    """The same of attention to chosen keys (``attention.indexer``): two products forward and five
    backward, scores and the two gradients of either product, all taken as equal.
    """
    return 2.5 + forward_passes(model)


def of_layers(model: ModelConfig, row: int, seen: float, decode: bool) -> QueryCost:
    """Elements that all layers multiply for a query that sees so many keys of a row."""
    shape = model.layer_shape
    found = [method.query_cost(shape, row, seen, decode) for method in model.attention]
    return QueryCost(*(model.periods * sum(x) for x in zip(*found, strict=True)))


def needed(model: ModelConfig, row: int, decode: bool) -> QueryCost:
    """The same for the mean query of a row, of the keys that queries see."""
    found = [of_layers(model, row, seen, decode) for seen in _lengths(row)]
    return QueryCost(*(statistics.mean(x) for x in zip(*found, strict=True)))


def _lengths(row: int) -> list[float]:
    """Numbers of keys that queries see, from the first of a row to its last: midpoints, whose mean
    is half of the row.
    """
    return [(at + 0.5) * row / _POINTS for at in range(_POINTS)]


def read_bytes(model: ModelConfig, context: int, tensor: int) -> float:
    """Bytes of keys and values that a device reads for the mean token of a row in decoding.

    tensor: devices over which heads are cut.
    """
    shape = model.layer_shape
    found = 0.0
    for method in model.attention:
        sizes = (method.decode_bytes(round(seen), shape, model.dtype) for seen in _lengths(context))
        found += statistics.mean(sizes) / (1 if method.page_heads is None else tensor)
    return found * model.periods


def cached_bytes(model: ModelConfig, tensor: int = 1) -> float:
    """Bytes that pages keep of one token on a device. A state, which is of a page, is not counted.

    tensor: devices over which heads are cut.
    """
    shape = model.layer_shape
    whole = (1 if method.page_heads is None else tensor for method in model.attention)
    sizes = (
        0 if method.keeps_state else method.token_bytes(shape, model.dtype)
        for method in model.attention
    )
    found = sum(size / parts for size, parts in zip(sizes, whole, strict=True))
    return found * model.periods


def pair(model: ModelConfig) -> int:
    """Elements of a key and a value of a head in training."""
    return max(method.pair_size(model.layer_shape, False) for method in model.attention)
