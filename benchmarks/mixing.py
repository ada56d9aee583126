"""Methods with projections of their own (gated delta net, MLA, DSA), for ``benchmarks.attention``.

They are timed as the other methods are, without the products that make their inputs from hidden
states and hidden states from their results: from random inputs to results. MLA and DSA expand
latent vectors into keys and values within that time, and the gated delta net has its convolution
and the gate of its result in it. DSA has 8 heads of 64 in its indexer, which take a sixth of what
MLA takes for a pair; in DeepSeek-V3.2 they take a fifth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.cache.reader import PageReader
from attention.cache.tables import sequence_pages
from attention.cache.writer import PageWriter
from attention.indexed import Indexed
from attention.layout import Layout
from attention.methods.dsa import DSA
from attention.methods.gated_delta import GatedDelta
from attention.methods.method import LayerShape, Method, PageShape
from attention.methods.mla import MLA
from models.layers import initial
from models.sharding import cut_over, per_shard
from planner.timing import spread

METHODS: dict[str, Method] = {
    "gated delta": GatedDelta(),
    "mla": MLA(),
    "dsa": DSA(index_heads=8, index_size=64),
}
# Tokens of a page: a state is kept for every page, and wants large ones.
PAGE, STATE_PAGE = 64, 1024


def drawn(
    method: Method, shape: LayerShape, rows: int, tokens: int, dtype
) -> tuple[dict[str, jax.Array], tuple[jax.Array, ...]]:
    """(parameters of a layer, its inputs of random hidden states), not rotated."""
    described = method.parameters(shape)
    keys = jax.random.split(jax.random.key(1), len(described))
    parameters = {
        name: jnp.ones(p.shape, dtype)
        if p.std is None
        else initial(key, p.shape, p.std).astype(dtype)
        for key, (name, p) in zip(keys, described.items(), strict=True)
    }
    y = jax.random.normal(jax.random.key(0), (rows, tokens, shape.embed_dim), dtype)
    return parameters, method.inputs(parameters, y, lambda x: x)


def runner(method: Method, shape: LayerShape) -> Callable[..., jax.Array]:
    """run(parameters, *inputs, layout) -> results of whole rows; every device has its heads."""

    def own(parameters, inputs, layout):
        if method.indexes:
            return method.mix_indexed(parameters, inputs, layout, Indexed(), None, over)[0]
        return method.mix(parameters, inputs, layout)

    axes = {name: p.axes for name, p in method.parameters(shape).items()}
    heads = tuple(("batch", None, head, None) for head in method.input_heads)
    over = cut_over("kv_heads")
    mapped = per_shard(own, (axes, heads, ("batch",)), ("batch", None, "kv_heads", None))
    return lambda parameters, *given: mapped(parameters, given[:-1], given[-1])


def least_flops(method: Method, shape: LayerShape, layout: Layout) -> float:
    """Lower bound on the FLOPs of the forward pass over one sequence, without projections."""
    tokens = layout.tokens.shape[1]
    if isinstance(method, GatedDelta):
        # a decay, two products with the state and an outer one
        heads, each, key, value = method.sizes(shape)
        return 6.0 * tokens * heads * each * key * value
    pairs = tokens * (tokens + 1) / 2
    if not isinstance(method, DSA) or tokens <= method.picks:
        return 2.0 * pairs * shape.num_heads * method.pair_size(shape, decode=False)
    chosen = pairs - (tokens - method.picks) * (tokens - method.picks + 1) / 2
    of_pair = shape.num_heads * method.pair_size(shape, decode=True)
    return 2.0 * (chosen * of_pair + pairs * method.index_heads * method.index_size)


def measure_decoding(
    name: str, method: Method, tokens: int, rows: int, shape: LayerShape, dtype: str, repeats: int
) -> dict:
    """``decode.measure`` of a method with projections of its own."""
    page = STATE_PAGE if method.keeps_state else PAGE
    count = -(-tokens // page)
    sizes = rows * count, shape.num_kv_heads, page, shape.head_dim, dtype
    pages = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(0), x.shape, x.dtype),
        method.pages(PageShape(*sizes, layer=shape)),
    )
    parameters, inputs = drawn(method, shape, rows, 1, dtype)
    tables = jnp.arange(rows * count, dtype=jnp.int32).reshape(rows, count)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(pages, inputs):
        places = jnp.full((rows, 1), tokens - 1, jnp.int32)
        view = sequence_pages(tables, jnp.full(rows, tokens, jnp.int32), page)
        seen, _ = view.at(places)
        at = PageWriter(tables, places, page, lambda k, positions: k)
        given = parameters, pages, inputs, at, seen, PageReader(view, page, jnp.dtype(dtype))
        if method.indexes:
            return method.mix_pages_indexed(*given, None)[:2]
        return method.mix_pages(*given)

    kept = [pages]

    def run():
        # the same pages again: a decoding loop writes them in place
        out, kept[0] = step(kept[0], inputs)
        return out

    return dict(
        method=name,
        tokens=tokens,
        rows=rows,
        implementation="xla",
        bytes=rows * method.decode_bytes(tokens, shape, dtype),
        **spread(run, repeats),
    )
