"""The programs that ``launch.aot kernels`` compiles: every kernel, forward and backward, with a real model's sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from launch.targets import Target
from pallas_kernels.cost import Cost
from pallas_kernels.flash import blocks, gpu, tpu
from pallas_kernels.selected import chunks
from pallas_kernels.selected import gpu as selected_gpu
from pallas_kernels.selected import tpu as selected_tpu
from pallas_kernels.selected import tuning as selected_tuning
from pallas_kernels.tokens import Tokens

# B, T, N, K, H: one row of 8,192 tokens with the heads of an 8-billion-parameter model
SHAPE = (1, 8192, 32, 8, 128)
# size of a block and picks of a query, as in NSA's paper
SELECTED = (64, 16)
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


def _tokens(array: Array, batch: int, length: int) -> Tokens:
    return Tokens(*[array(batch, length, dtype=jnp.int32)] * 4)


def _flash(target: Target, array: Array) -> Iterator[Program]:
    batch, length, heads, kv_heads, head_dim = SHAPE
    q, k = array(batch, length, heads, head_dim), array(batch, length, kv_heads, head_dim)
    sums, tokens = array(batch, length, heads, dtype=jnp.float32), _tokens(array, batch, length)
    module = {"tpu": tpu, "cuda": gpu}[target.platform]
    tuning = blocks.heuristic(target.kind, heads // kv_heads, head_dim)
    for name in NAMES["flash"]:
        yield Program(
            f"flash {name}",
            functools.partial(getattr(module, name), window=None, tuning=tuning),
            (q, k, k, tokens, tokens) + ((sums, sums, q) if name != "forward" else ()),
            blocks.cost(name, q.shape, k.shape, q.dtype.itemsize, tuning, cached=target.platform == "cuda"),
            None if target.name in module.TARGETS else module.ELSEWHERE,
        )


def _selected(target: Target, array: Array) -> Iterator[Program]:
    """The whole passes, with what XLA does around the kernels."""
    (batch, length, heads, kv_heads, head_dim), (size, picks) = SHAPE, SELECTED
    q, k = array(batch, length, heads, head_dim), array(batch, length, kv_heads, head_dim)
    lse, order = array(batch, length, heads, dtype=jnp.float32), array(batch, length, dtype=jnp.int32)
    chosen = array(batch, length, kv_heads, picks, dtype=jnp.int32)
    module = {"tpu": selected_tpu, "cuda": selected_gpu}[target.platform]
    options = {"size": size, "kernels": module, "tuning": selected_tuning.heuristic(target.kind)}
    for name in NAMES["selected"]:
        yield Program(
            f"selected {name}",
            functools.partial(getattr(chunks, name), **options),
            (q, k, k, chosen, order, order) + ((q, lse, q, lse) if name == "backward" else ()),
            selected_tuning.cost(
                name, q.shape, k.shape, q.dtype.itemsize, picks=picks, size=size, passes=module.PASSES
            ),
            None if target.name in module.TARGETS else module.ELSEWHERE,
        )


NAMES = {"flash": ("forward", "backward_q", "backward_kv"), "selected": ("forward", "backward")}
FAMILIES: dict[str, Callable[[Target, Array], Iterator[Program]]] = {"flash": _flash, "selected": _selected}
