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


NAMES = {"flash": ("forward", "backward_q", "backward_kv")}
FAMILIES: dict[str, Callable[[Target, Array], Iterator[Program]]] = {"flash": _flash}
