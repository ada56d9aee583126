"""The programs that ``launch.aot kernels`` compiles: every kernel, forward and backward, with a
real model's sizes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from launch.targets import Target
from pallas_kernels.compressed import blocks as compressed_blocks
from pallas_kernels.compressed import gpu as compressed_gpu
from pallas_kernels.compressed import tpu as compressed_tpu
from pallas_kernels.compressed.blocks import Selection
from pallas_kernels.cost import Cost
from pallas_kernels.flash import blocks, gpu, tpu
from pallas_kernels.paged import api as paged_api
from pallas_kernels.paged import lists as paged_lists
from pallas_kernels.selected import chunks
from pallas_kernels.selected import gpu as selected_gpu
from pallas_kernels.selected import tpu as selected_tpu
from pallas_kernels.selected import tuning as selected_tuning
from pallas_kernels.tokens import Tokens

# B, T, N, K, H: one row of 8,192 tokens with the heads of an 8-billion-parameter model
SHAPE = (1, 8192, 32, 8, 128)
# B, T, N, K, H, then tokens of a row, of a page, and pages picked: decoding with the heads of NSA
# (2502.11089)
PAGED_SHAPE = (8, 1, 64, 4, 128, 65536, 64, 16)
# size of a block and picks of a query, as in NSA's paper
SELECTED = (64, 16)
# (*shape, dtype=bfloat16) to an array of the target that is never made
Array = Callable[..., jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel to compile: ``function`` of ``arguments``; obstacle: why the target has none, else
    None.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    cost: Cost
    obstacle: str | None = None


def programs(target: Target, array: Array) -> Iterator[Program]:
    """Every program of a target."""
    for family in FAMILIES.values():
        yield from family(target, array)


def _tokens(array: Array, batch: int, length: int, fields: int = 4) -> Tokens:
    return Tokens(*[array(batch, length, dtype=jnp.int32)] * fields)


def _flash(target: Target, array: Array) -> Iterator[Program]:
    heads, kv_heads, head_dim = SHAPE[2:]
    tuning = blocks.heuristic(target.kind, heads // kv_heads, head_dim)
    yield from _attention("flash", target, array, SHAPE[1], 4, tuning)


def _attention(
    family: str, target: Target, array: Array, keys: int, fields: int, tuning: blocks.TuningConfig
) -> Iterator[Program]:
    """The flash kernels for so many keys, and tokens of so many fields."""
    batch, length, heads, kv_heads, head_dim = SHAPE
    q = array(batch, length, heads, head_dim)
    k = array(batch, keys, kv_heads, head_dim)
    sums = array(batch, length, heads, dtype=jnp.float32)
    tokens = [_tokens(array, batch, size, fields) for size in (length, keys)]
    module = {"tpu": tpu, "cuda": gpu}[target.platform]
    for name in NAMES["flash"]:
        yield Program(
            f"{family} {name}",
            functools.partial(getattr(module, name), window=None, tuning=tuning),
            (q, k, k, *tokens) + ((sums, sums, q) if name != "forward" else ()),
            blocks.cost(
                name, q.shape, k.shape, q.dtype.itemsize, tuning, cached=target.platform == "cuda"
            ),
            None if target.name in module.TARGETS else module.ELSEWHERE,
        )


def _paged(target: Target, array: Array) -> Iterator[Program]:
    batch, queries, heads, kv_heads, head_dim, length, page, picks = PAGED_SHAPE
    count = length // page
    q = array(batch, queries, heads, head_dim)
    pages = array(batch * count, kv_heads, page, head_dim)
    tables = array(batch, count, dtype=jnp.int32)
    places = array(batch, queries, dtype=jnp.int32)
    chosen = array(batch, queries, kv_heads, picks, dtype=jnp.int32)
    lengths = array(batch, dtype=jnp.int32)
    implementation = {"tpu": "tpu", "cuda": "gpu"}[target.platform]
    module = paged_api.KERNELS[implementation]
    rows = (batch, kv_heads, heads // kv_heads * queries, head_dim)
    for name in NAMES["paged"]:
        of_list, lists = (count, None) if name == "dense" else (picks, kv_heads)
        tuning = paged_api.tune(target.kind, q, pages, of_list, lists)
        yield Program(
            f"paged {name}",
            functools.partial(paged_api.forward, implementation, window=None, tuning=tuning),
            (q, pages, pages, None if name == "dense" else chosen, tables, places, lengths),
            paged_lists.cost(rows, of_list * page, q.dtype.itemsize, tuning.splits),
            None if target.name in module.TARGETS else module.ELSEWHERE,
        )


def _selected(target: Target, array: Array) -> Iterator[Program]:
    """The whole passes, with what XLA does around the kernels."""
    (batch, length, heads, kv_heads, head_dim), (size, picks) = SHAPE, SELECTED
    q = array(batch, length, heads, head_dim)
    k = array(batch, length, kv_heads, head_dim)
    lse = array(batch, length, heads, dtype=jnp.float32)
    order = array(batch, length, dtype=jnp.int32)
    chosen = array(batch, length, kv_heads, picks, dtype=jnp.int32)
    module = {"tpu": selected_tpu, "cuda": selected_gpu}[target.platform]
    options = {"size": size, "kernels": module, "tuning": selected_tuning.heuristic(target.kind)}
    for name in NAMES["selected"]:
        yield Program(
            f"selected {name}",
            functools.partial(getattr(chunks, name), **options),
            (q, k, k, chosen, order, order) + ((q, lse, q, lse) if name == "backward" else ()),
            selected_tuning.cost(
                name,
                q.shape,
                k.shape,
                q.dtype.itemsize,
                picks=picks,
                size=size,
                passes=module.PASSES,
            ),
            None if target.name in module.TARGETS else module.ELSEWHERE,
        )


def _compressed(target: Target, array: Array) -> Iterator[Program]:
    batch, length, heads, kv_heads, head_dim = SHAPE
    selection = Selection()  # the paper's
    count = length // selection.block
    keys = length // selection.stride
    tuning = compressed_blocks.heuristic(target.kind, heads // kv_heads, head_dim, count)
    yield from _attention("compressed", target, array, keys, 5, tuning.attention)
    module = {"tpu": compressed_tpu, "cuda": compressed_gpu}[target.platform]
    q = array(batch, length, heads, head_dim)
    k = array(batch, keys, kv_heads, head_dim)
    lse = array(batch, length, heads, dtype=jnp.float32)
    shadows = array(batch, count, dtype=jnp.int32)
    yield Program(
        "compressed select",
        functools.partial(module.select, selection=selection, tuning=tuning),
        (q, k, lse, *(_tokens(array, batch, size, 5) for size in (length, keys, count)), shadows),
        compressed_blocks.cost(q.shape, k.shape, q.dtype.itemsize, selection, tuning),
        None if target.name in module.TARGETS else module.ELSEWHERE,
    )


NAMES = {
    "flash": ("forward", "backward_q", "backward_kv"),
    "compressed": ("forward", "backward_q", "backward_kv", "select"),
    "selected": ("forward", "backward"),
    "paged": ("dense", "selected"),
}
FAMILIES: dict[str, Callable[[Target, Array], Iterator[Program]]] = {
    "flash": _flash,
    "compressed": _compressed,
    "selected": _selected,
    "paged": _paged,
}
# What the programs of a family are given.
SIZES = {
    "flash": "{} row of {} causal tokens, {} heads over {}, head size {}".format(*SHAPE),
    "compressed": "as flash, one key for every {0.stride} tokens, {0.picks} blocks picked".format(
        Selection()
    ),
    "selected": "as flash, {1} blocks of {0} for every query".format(*SELECTED),
    "paged": "{} rows of {} new token, {} heads over {}, head size {}, {} tokens in pages of {}, "
    "{} of them picked".format(*PAGED_SHAPE),
}
