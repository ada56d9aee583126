"""The programs that ``launch.aot kernels`` compiles: every kernel, forward and backward, with a real model's sizes."""

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
from pallas_kernels.cost import Cost
from pallas_kernels.flash import blocks, gpu, tpu
from pallas_kernels.tokens import Tokens

# B, T, N, K, H: one row of 8,192 tokens with the heads of an 8-billion-parameter model
SHAPE = (1, 8192, 32, 8, 128)
# (*shape, dtype=bfloat16) to an array of the target that is never made
Array = Callable[..., jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel to compile: ``function`` of ``arguments``; obstacle: why the target has none, else None."""

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
    q, k = array(batch, length, heads, head_dim), array(batch, keys, kv_heads, head_dim)
    sums = array(batch, length, heads, dtype=jnp.float32)
    tokens = [_tokens(array, batch, size, fields) for size in (length, keys)]
    module = {"tpu": tpu, "cuda": gpu}[target.platform]
    for name in NAMES["flash"]:
        yield Program(
            f"{family} {name}",
            functools.partial(getattr(module, name), window=None, tuning=tuning),
            (q, k, k, *tokens) + ((sums, sums, q) if name != "forward" else ()),
            blocks.cost(name, q.shape, k.shape, q.dtype.itemsize, tuning, cached=target.platform == "cuda"),
            None if target.name in module.TARGETS else module.ELSEWHERE,
        )


def _compressed(target: Target, array: Array) -> Iterator[Program]:
    batch, length, heads, kv_heads, head_dim = SHAPE
    selection = compressed_blocks.Selection()  # the paper's
    count, keys = length // selection.block, length // selection.stride
    tuning = compressed_blocks.heuristic(target.kind, heads // kv_heads, head_dim, count)
    yield from _attention("compressed", target, array, keys, 5, tuning.attention)
    module = {"tpu": compressed_tpu, "cuda": compressed_gpu}[target.platform]
    q, k = array(batch, length, heads, head_dim), array(batch, keys, kv_heads, head_dim)
    lse, shadows = array(batch, length, heads, dtype=jnp.float32), array(batch, count, dtype=jnp.int32)
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
}
FAMILIES: dict[str, Callable[[Target, Array], Iterator[Program]]] = {"flash": _flash, "compressed": _compressed}
