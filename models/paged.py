"""The model over a paged cache: prompts in chunks, and decoding.

Dimensions: B rows, T tokens, D model.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.cache import gathered
from attention.cache.paged import (
    PagedCache,
    attend_and_note,
    init_cache,
    write,
    write_and_attend,
)
from attention.cache.reader import PageReader
from attention.cache.tables import Pages, Runs, sequence_pages
from attention.cache.writer import PageWriter
from attention.keys import Keys
from attention.methods.method import Method, Parameters
from models.functions import rope
from models.layers import Layers
from models.model_config import ModelConfig
from models.sharding import per_shard
from models.transformer import Transformer, gated
from pallas_kernels.tokens import Tokens


def model_cache(
    config: ModelConfig,
    num_pages: int,
    dtype=None,
    *,
    page: int | None = None,
    undone: int = 0,
) -> PagedCache:
    """An empty cache for a model; arguments as for ``init_cache``."""
    methods = _methods(config)
    heads = config.num_kv_heads
    size = config.head_dim
    options = dict(page=page, undone=undone, layer=config.layer_shape)
    return init_cache(methods, num_pages, heads, size, dtype or config.dtype, **options)


def _methods(config: ModelConfig) -> tuple[Method, ...]:
    """The method of every layer."""
    return config.attention * (config.num_layers // len(config.attention))


# For a function of one layer: it is traced once for all layers that are alike. To trace every layer
# takes longer than to read the compiled program from the compilation cache. With ``inline`` the
# program is the same as if each layer had been traced. A call would not be: XLA leaves out some
# roundings to bfloat16 within a layer, and could then not leave them out between two layers.
_once_for_layers_alike = functools.partial(jax.jit, inline=True)


def forward(
    model: Transformer,
    cache: PagedCache,
    tokens: Int[Array, "B T"],
    places: Int[Array, "B T"],
    pages: Pages,
) -> tuple[Float[Array, "B T D"], PagedCache]:
    """Runs new tokens: (final hidden states, the cache with the tokens in it).

    places: of the tokens, consecutive in a row, then -1 for padding. All places before them must
    have been written. pages: the rows as they are with these tokens in them.
    """
    seen, positions = pages.at(places)

    # own: a cache of this layer alone. chosen: the places that the layer before chose, if any
    @_once_for_layers_alike
    def run(layer, parameters, own, x, positions, places, seen, pages, chosen):
        def attention(layer, y):
            nonlocal own, chosen
            if own.methods[0].mixes:
                rows = (positions, places, pages, seen, pages)
                out, own, chosen = _mix(model, own, parameters, y, *rows, chosen)
                return out
            *found, gate = new_keys(model, own.methods[0], parameters, layer, y, positions)
            out, own, _ = _write_and_attend(
                model, own, parameters, found, places, pages, seen, pages
            )
            return gated(out, gate)

        return model.block(layer, x, attention, places >= 0)[0], own, chosen

    x = model.embed_tokens(tokens)
    chosen = None
    for index, (layer, parameters) in enumerate(model.unstacked()):
        own = cache.of_layer(index)
        x, own, chosen = run(layer, parameters, own, x, positions, places, seen, pages, chosen)
        cache = cache.with_layer(index, own.layers[0])
    return model.finish(x), cache


def decode_tokens(
    model: Transformer,
    cache: PagedCache,
    gathers: dict[int, gathered.GatheredPages],
    rows: gathered.SharedRows,
    tables: Int[Array, "B P"],
    tokens: Int[Array, "B T"],
    places: Int[Array, "B T"],
    runs: Runs | None = None,
    note: bool = False,
) -> tuple[
    Float[Array, "B T D"],
    PagedCache,
    dict[int, gathered.GatheredPages],
    tuple[list[Int[Array, "B T K n"]], list[Int[Array, "B T k"]]],
]:
    """Runs the next tokens of every row: (final hidden states, the cache, the gathered pages, with
    ``note`` the picks of every layer whose method has ``noted_picks`` and the experts of every
    layer that has any).

    All of a row's tokens are written first. Then each attends as if it were a row of its own, which
    ends with it. What is computed for a token therefore does not depend on how many tokens of its
    row come before or behind it in this call.

    gathers: by layer, from ``gather_pages``, the pages that are laid side by side. These layers do
      not read the cache. Their new keys stay in the gathered pages until ``put_pages_back``.
    rows: which pages were gathered for which rows.
    tables: all pages of the rows.
    places: of the tokens, consecutive in a row, then -1 for none.
    runs: what the rows' pages hold; None where no row has documents.
    """
    pages = None
    written = None
    seen = None
    if not gathers:
        rows = None
    # only layers that are not gathered read these
    if len(gathers) < len(cache.methods):
        written = sequence_pages(tables, jnp.max(places, axis=1) + 1, cache.page, runs)
        count = places.shape[1]
        pages = written
        if count > 1:
            apart = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), (tables, runs))
            pages = sequence_pages(apart[0], places.reshape(-1) + 1, cache.page, apart[1])
        seen = pages.at(places.reshape(-1, 1))[0]
    # where there is no token something is computed at position 0, which is not written
    positions = jnp.maximum(places, 0)
    if runs is not None:
        positions = runs.positions(positions, cache.page)

    # own: a cache of this layer alone. gather: its pages laid side by side; None if they are not.
    # chosen: the places that the layer before chose, if any.
    @_once_for_layers_alike
    def run(
        layer, parameters, own, gather, x, positions, places, rows, written, seen, pages, chosen
    ):
        (method,) = own.methods
        picks = []

        def attention(layer, y):
            nonlocal own, gather, picks, chosen
            if method.mixes:
                rows_seen = (places, written, seen, pages)
                out, own, chosen = _mix(model, own, parameters, y, positions, *rows_seen, chosen)
                if note and method.noted_picks() is not None:
                    picks = [_noted(chosen, places)]
                return out
            q, new, inputs, gate = new_keys(model, method, parameters, layer, y, positions)
            if gather is not None:
                # the new keys go into the gathered pages, before they are attended to
                gather = gathered.write(gather, rows, places, new["main"])
                return gated(gathered.attend(gather, rows, q, places), gate)
            out, own, picks = _write_and_attend(
                *(model, own, parameters, (q, new, inputs), places, written, seen, pages),
                note=note and method.noted_picks() is not None,
            )
            return gated(out, gate)

        x, routing = model.block(layer, x, attention, places >= 0)
        experts = [routing.experts] if note and routing is not None else []
        return x, own, gather, picks, experts, chosen

    x = model.embed_tokens(tokens)
    gathers = dict(gathers)
    noted = []
    noted_experts = []
    chosen = None
    for index, (layer, parameters) in enumerate(model.unstacked()):
        held = (layer, parameters, cache.of_layer(index), gathers.get(index))
        x, own, gather, picks, experts, chosen = run(
            *held, x, positions, places, rows, written, seen, pages, chosen
        )
        cache = cache.with_layer(index, own.layers[0])
        if gather is not None:
            gathers[index] = gather
        noted += picks
        noted_experts += experts
    return model.finish(x), cache, gathers, (noted, noted_experts)


# The logical axes of heads [B, T, heads, H], and of what a layer keeps in pages. A row's pages are
# anywhere in the cache, so rows and pages are not cut here.
_HEADS = (None, None, "heads", None)
_KV_HEADS = (None, None, "kv_heads", None)
_PAGES = (None, "kv_heads")


def _write_and_attend(
    model: Transformer,
    cache: PagedCache,
    parameters: Parameters,
    found: tuple[jax.Array, Keys, jax.Array | None],
    places: Int[Array, "B T"],
    written: Pages,
    seen: Tokens,
    pages: Pages,
    note: bool = False,
) -> tuple[Float[Array, "B T N H"], PagedCache, list[Int[Array, "B T K n"]]]:
    """Writes the new keys of a layer and attends to all: (the result, the cache with the keys, with
    ``note`` the picks).

    Under a mesh every device has its own heads: kernels cannot be cut by the compiler.

    cache: of this layer alone. found: from ``new_keys``. places: of the new tokens. written: the
      rows' pages. seen: these tokens, as attention sees them, and pages: the pages that they see.
      Both are of the same rows, or of rows of one token each.
    """
    q, new, inputs = found
    (method,) = cache.methods
    axes = {name: p.axes for name, p in method.parameters(model.config.layer_shape).items()}

    def own(layer, parameters, q, new, places, written, seen, pages, *extra):
        # with the heads of this device
        mine = cache.with_layer(0, layer)
        rotate = functools.partial(rope, config=model.config)
        # written before they are read, since a token sees itself and those of its chunk
        options = dict(parameters=parameters, rotate=rotate)
        q, *extra = (x.reshape(*seen.shape, *x.shape[2:]) for x in (q, *extra))
        (inputs,) = extra or (None,)
        picks = []
        if note:
            mine = write(mine, 0, written.tables, places, new, runs=written.runs, **options)
            out, *picks = attend_and_note(mine, 0, q, seen, pages, inputs=inputs)
        else:
            rows = (q, seen, pages)
            out, mine = write_and_attend(
                mine, 0, written, places, new, *rows, inputs=inputs, **options
            )
        out, *picks = (x.reshape(*places.shape, *x.shape[2:]) for x in (out, *picks))
        return out, mine.layers[0], picks

    # ``inputs`` is an argument only for a method that has any
    extra = () if inputs is None else (inputs,)
    mapped = per_shard(
        own,
        (_PAGES, axes, _HEADS, _KV_HEADS, (), (), (), (), *(_HEADS for _ in extra)),
        (_HEADS, _PAGES, _KV_HEADS),
    )
    rows = (places, written, seen, pages)
    out, layer, picks = mapped(cache.layers[0], parameters, q, new, *rows, *extra)
    return out, cache.with_layer(0, layer), picks


def _mix(
    model: Transformer,
    cache: PagedCache,
    parameters: Parameters,
    y: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    places: Int[Array, "B T"],
    written: Pages,
    seen: Tokens,
    pages: Pages,
    chosen: Int[Array, "B T n"] | None,
) -> tuple[Float[Array, "B T D"], PagedCache, Int[Array, "B T n"] | None]:
    """(The result of a layer whose method has projections of its own, the cache with the new tokens
    in it, the places that its queries attend to where it has an indexer). Every device has its own
    heads.

    cache: of this layer alone. y: normalised hidden states. positions: that RoPE rotates by.
    chosen: the places of the layer before, of the queries of ``seen``; None for all. The other
    arguments are those of ``_write_and_attend``.
    """
    (method,) = cache.methods
    axes = {name: p.axes for name, p in method.parameters(model.config.layer_shape).items()}
    rotate = functools.partial(rope, config=model.config)

    def own(parameters, layer, inputs, places, written, seen, pages, chosen):
        at = PageWriter(written.tables, places, cache.page, rotate, written.runs)
        read = PageReader(pages, cache.page, inputs[0].dtype)
        rows = (parameters, layer, inputs, at, seen, read)
        if method.indexes:
            return method.mix_pages_indexed(*rows, *(chosen or (None,)))
        return (*method.mix_pages(*rows), None)

    of_pages = (None, method.page_heads)
    of_heads = (None, None, "kv_heads", None)
    turn = functools.partial(rope, positions=positions, config=model.config)
    inputs = method.inputs(parameters, y, turn)
    heads = tuple(
        (None, None, axis, None) for axis, _ in zip(method.input_heads, inputs, strict=False)
    )
    mapped = per_shard(own, (axes, of_pages, heads, (), (), (), (), ()), (of_heads, of_pages, ()))
    rows = (places, written, seen, pages)
    chosen = () if chosen is None else (chosen,)
    mixed, layer, chosen = mapped(parameters, cache.layers[0], inputs, *rows, chosen)
    return method.output(parameters, mixed), cache.with_layer(0, layer), chosen


def _noted(chosen: Int[Array, "B T n"] | None, places: Int[Array, "B T"]) -> Int[Array, "B T 1 n"]:
    """Places as picks of the tokens of rows: none where queries attended to all that they saw."""
    if chosen is None:
        return jnp.full((*places.shape, 1, 1), -1)
    return chosen.reshape(*places.shape, 1, -1)


def gather_pages(
    cache: PagedCache,
    rows: gathered.SharedRows,
    block: int,
    reach: Int[Array, ""],
    firsts: Int[Array, " B"],
) -> dict[int, gathered.GatheredPages]:
    """By layer, the pages laid side by side, for those layers whose method reads all pages.

    Arguments as for ``gathered.gather``.
    """

    @_once_for_layers_alike
    def gather(own, rows, reach, firsts):
        return gathered.gather(own, 0, rows, block, reach, firsts)

    layers = [index for index, method in enumerate(cache.methods) if method.reads_all_pages]
    return {index: gather(cache.of_layer(index), rows, reach, firsts) for index in layers}


def put_pages_back(
    cache: PagedCache,
    gathers: dict[int, gathered.GatheredPages],
    rows: gathered.SharedRows,
    firsts,
    counts,
    steps: int,
):
    """The cache with what was decoded into gathered pages.

    Arguments as for ``gathered.put_back``.
    """

    @_once_for_layers_alike
    def put_back(own, gather, rows, firsts, counts):
        return gathered.put_back(own, 0, gather, rows, firsts, counts, steps)

    for index, gather in gathers.items():
        own = put_back(cache.of_layer(index), gather, rows, firsts, counts)
        cache = cache.with_layer(index, own.layers[0])
    return cache


def new_keys(
    model: Transformer,
    method: Method,
    parameters: Parameters,
    layer: Layers,
    y: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
) -> tuple[
    Float[Array, "B T N H"],
    Keys,
    Float[Array, "B T N parts"] | None,
    Float[Array, "B T N H"] | None,
]:
    """A layer's results for new tokens: (q rotated, the keys to write, the head inputs, the gate of
    the result).

    y: normalised hidden states, from ``Transformer.before_attention``. The head inputs are
    those of ``Method.head_inputs``.
    """
    q, k, v, gate = model.qkv(layer, y)
    turn = functools.partial(rope, positions=positions, config=model.config)
    new = {"main": (k, v), **model.new_keys(method, parameters, layer, y)}
    for name in method.rotated_when_written():
        k, v = new[name]
        new[name] = turn(k), v
    return turn(q), new, method.head_inputs(parameters, y), gate
