"""Costs of the layers' attention, by arithmetic: operations, bytes of pages that are kept and read.

Every method of attention says how many elements a query multiplies (``Method.query_cost``) and how
many bytes a token reads (``Method.decode_bytes``). Here these are added over the layers of a model
and averaged over the queries of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from attention.methods.method import LayerShape, Method, PageShape
from attention.query_cost import PAGE, QueryCost
from models.model_config import ModelConfig
from planner.workload import Workload

# Lengths of a row at which costs that a number of keys caps are averaged. The mean of a cap
# anywhere in the row is exact to 1 / (8 * 64^2) of the row, and that of a cost without cap exact.
_POINTS = 64
# (weight, keys that a query sees): the weights of a list add up to 1.
Seen = Sequence[tuple[float, float]]


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


def solved_passes(model: ModelConfig) -> float:
    """The same of triangular systems: one forward, and backward two more and a product that is as
    much as two.
    """
    return 4.0 + forward_passes(model)


def of_layers(model: ModelConfig, row: int, seen: float, decode: bool) -> QueryCost:
    """Elements that all layers multiply for a query that sees so many keys of a row."""
    shape = model.layer_shape
    found = [method.query_cost(shape, row, seen, decode) for method in model.attention]
    return QueryCost(*(model.periods * sum(x) for x in zip(*found, strict=True)))


def needed(model: ModelConfig, row: int, seen: Seen, decode: bool) -> QueryCost:
    """The same for the mean of queries that see so many keys of a row."""
    found = [(weight, of_layers(model, row, keys, decode)) for weight, keys in seen]
    means = (sum(w * getattr(cost, name) for w, cost in found) for name in QueryCost._fields)
    return QueryCost(*means)


def of_row(job: Workload, parts: int = 1) -> Seen:
    """The keys that queries of a row see, of the last of so many equal parts of the row.

    A token in a document sees what precedes it in the document; a token behind them all, which
    stand at the beginning of the row, sees all that precedes it.
    """
    first = job.context * (1 - 1 / parts)
    if job.documents is None:
        return _points(first, job.context)
    inside = job.documents.count * job.documents.tokens
    begins = max(first, inside)
    share = (job.context - begins) / (job.context - first)
    tail = [(share * weight, keys) for weight, keys in _points(begins, job.context)]
    return tail + [((1 - share) * weight, x) for weight, x in _points(0, job.documents.tokens)]


def of_decoding(job: Workload) -> Seen:
    """The keys that tokens see that are sampled: anywhere in a row, or behind its documents."""
    inside = 0 if job.documents is None else job.documents.count * job.documents.tokens
    return _points(inside, job.context)


def _points(first: float, last: float) -> Seen:
    """Numbers of keys at equal distances between two, and equal weights."""
    step = (last - first) / _POINTS
    return [(1 / _POINTS, first + (at + 0.5) * step) for at in range(_POINTS)]


def read_bytes(job: Workload, tensor: int) -> float:
    """Bytes of keys and values that a device reads for the mean token of a row in decoding.

    tensor: devices over which heads are cut.
    """
    shape, dtype = job.model.layer_shape, job.model.dtype

    def of_one(method: Method) -> float:
        return sum(w * method.decode_bytes(round(x), shape, dtype) for w, x in of_decoding(job))

    return _over_layers(job.model, tensor, of_one)


def cached_bytes(model: ModelConfig, tensor: int = 1) -> float:
    """Bytes that pages keep of one token on a device. A state, which is of a page, is not counted.

    tensor: devices over which heads are cut.
    """

    def of_one(method: Method) -> float:
        if method.keeps_state:
            return 0.0
        page = method.block_size() or PAGE
        sizes = model.num_kv_heads, page, model.head_dim, jnp.dtype(model.dtype)
        arrays = jax.tree.leaves(method.pages(PageShape(1, *sizes, layer=model.layer_shape)))
        return sum(x.size * x.dtype.itemsize for x in arrays) / page

    return _over_layers(model, tensor, of_one)


def _over_layers(model: ModelConfig, tensor: int, of_one: Callable[[Method], float]) -> float:
    """The sum over all layers of what pages take on a device, where heads are cut over tensor."""
    parts = [1 if method.page_heads is None else tensor for method in model.attention]
    found = (of_one(method) / n for method, n in zip(model.attention, parts, strict=True))
    return sum(found) * model.periods


def derived_elements(model: ModelConfig) -> int:
    """Elements of the layers' parameters that hidden states are not multiplied by."""
    shape = model.layer_shape
    found = (
        math.prod(method.parameters(shape)[name].shape)
        for method in model.attention
        for name in method.derives()
    )
    return sum(found) * model.periods


def new_elements(model: ModelConfig) -> int:
    """Elements of keys and values that all layers make of a token in training, all branches."""
    shape = model.layer_shape
    found = 0
    for method in model.attention:
        found += _branches(method, shape) * shape.num_kv_heads * method.pair_size(shape, False)
    return found * model.periods


def layer_elements(model: ModelConfig) -> float:
    """Elements of a token in the attention of the layer that has the most: queries, results of all
    branches and their sum, keys and values.
    """
    shape = model.layer_shape
    found = 0.0
    for method in model.attention:
        branches = _branches(method, shape)
        results = branches + (branches > 1)
        # a query and a result take a pair
        own = shape.num_heads * (1 + results) / 2 + shape.num_kv_heads * branches
        found = max(found, own * method.pair_size(shape, False))
    return found


def gathered_elements(model: ModelConfig, row: int) -> int:
    """Elements of queries that a layer copies at a time to attend to chosen blocks of a row."""
    shape = model.layer_shape
    return max(method.gathered_elements(shape, row) for method in model.attention)


def _branches(method: Method, shape: LayerShape) -> int:
    """Sets of keys that a method makes of hidden states."""
    return 1 + sum(each.like == "k" for each in method.parameters(shape).values())


def pair(model: ModelConfig) -> int:
    """Elements of a key and a value of a head in training."""
    return max(method.pair_size(model.layer_shape, False) for method in model.attention)
