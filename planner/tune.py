"""Finds the block sizes of a kernel that are fastest on this device.

The search starts from the sizes that the kernel chooses itself. One size after another is halved or
doubled, and the change is kept if it makes the forward and backward pass faster (for paged
attention, the forward pass).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from attention.blocks import entries, in_place
from pallas_kernels import tuned
from pallas_kernels.choice import device
from pallas_kernels.compressed import api as compressed
from pallas_kernels.compressed import blocks as compressed_blocks
from pallas_kernels.flash import api as flash
from pallas_kernels.grouped import api as grouped
from pallas_kernels.grouped import blocks as grouped_blocks
from pallas_kernels.paged import api as paged
from pallas_kernels.selected import api as selected
from pallas_kernels.tokens import sequences
from planner.timing import spread
from rl_code.host.files import write_atomically

# The errors of a setting that cannot be compiled or does not fit the kernel.
_REFUSED = (jax.errors.JaxRuntimeError, NotImplementedError, ValueError)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of the random input."""

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    # Consecutive queries that choose the same blocks.
    alike: int = 8
    # Experts, rows and columns of the matrix of each.
    matrices: tuple[int, int, int] = (128, 2048, 768)


@dataclasses.dataclass(frozen=True)
class Search:
    """A kernel that is tuned for one shape."""

    # The name of its entry in the file.
    name: str
    # The setting from which the search starts.
    start: Any
    # From a setting to a function without arguments that runs the kernel with it.
    program: Callable[[Any], Callable[[], Any]]


def tune(search: Search, path: Path, repeats: int) -> Any:
    """Searches for the fastest setting, writes every improvement, and returns the best one."""
    best = search.start
    seconds = measure(search, search.start, repeats)
    if seconds is None:
        sys.exit(
            f"{search.name}: the heuristic's own sizes do not run, there is nothing to start from"
        )
    save(path, search, best, seconds, seconds)
    first = seconds
    tried = {search.start}
    improved = True
    while improved:
        improved = False
        for candidate in neighbours(best):
            if candidate in tried:
                continue
            tried.add(candidate)
            found = measure(search, candidate, repeats)
            if found is not None and found < seconds:
                best, seconds, improved = candidate, found, True
                save(path, search, best, seconds, first)
                break
    print(
        f"{search.name}: {1e3 * first:.3f} -> {1e3 * seconds:.3f} ms, {len(tried)} settings tried: "
        f"{best}"
    )
    return best


def neighbours(config: Any) -> Iterator[Any]:
    """All settings that differ in one field: a size doubled or halved, or a switch changed."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from (
                dataclasses.replace(config, **{field.name: other}) for other in neighbours(value)
            )
        elif isinstance(value, bool):  # asked before int, since every bool is an int
            yield dataclasses.replace(config, **{field.name: not value})
        elif isinstance(value, int):
            for other in (2 * value, value // 2):
                if other >= 1:
                    yield dataclasses.replace(config, **{field.name: other})


def measure(search: Search, setting: Any, repeats: int) -> float | None:
    """The median seconds of a setting, or None if it cannot be compiled. Prints either."""
    try:
        seconds = spread(search.program(setting), repeats)["seconds"]
    except _REFUSED as error:
        print(f"{setting}: {str(error).splitlines()[0][:100]}", flush=True)
        return None
    print(f"{setting}: {1e3 * seconds:.3f} ms", flush=True)
    return seconds


def save(path: Path, search: Search, setting: Any, seconds: float, first: float) -> None:
    """Writes a kernel's entry into the file and keeps the entries of others.

    seconds: with this setting. first: with the setting from which the search started.
    """
    known = json.loads(path.read_text()) if path.exists() else {}
    found = dict(sizes=dataclasses.asdict(setting), seconds=seconds, heuristic_seconds=first)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(known | {search.name: found}, indent=1).encode())


# --- The kernels ----------------------------------------------------------------------------------


def _inputs(shape: Shape, keys: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random q, k and v for ``keys`` keys in a row, in bfloat16."""
    shapes = ((shape.tokens, shape.heads), (keys, shape.kv_heads), (keys, shape.kv_heads))
    drawn = jax.random.split(jax.random.key(0), 3)
    return tuple(
        jax.random.normal(key, (shape.rows, *size, shape.head_dim), jnp.bfloat16)
        for key, size in zip(drawn, shapes, strict=True)
    )


def _with_gradients(attend: Callable, qkv: tuple[jax.Array, ...], *given: Any) -> Callable:
    """A function that computes the gradients of ``attend(q, k, v, *given)`` for q, k and v.

    What is given, and the gradient of the result, are arguments of the program: as constants they
    would be folded, for seconds in each compilation.
    """
    along = jax.random.normal(jax.random.key(3), qkv[0].shape, jnp.float32)

    def total(q, k, v, along, *given):
        out, lse, *_ = attend(q, k, v, *given)
        return jnp.sum(out * along) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    step = jax.jit(jax.grad(total, (0, 1, 2)))
    return lambda: step(*qkv, along, *given)


def _flash(shape: Shape, implementation: str, interpret: Any) -> Search:
    on = device(implementation)
    groups = shape.heads // shape.kv_heads
    qkv = _inputs(shape, shape.tokens)
    tokens = sequences(jnp.full(shape.rows, shape.tokens), shape.tokens)
    options = dict(implementation=implementation, interpret=interpret)
    return Search(
        tuned.key("flash", on, groups=groups, head_dim=shape.head_dim),
        flash.heuristic(on, groups, shape.head_dim),
        lambda setting: _with_gradients(
            lambda *x: flash.flash_attention(*x, tuning=setting, **options), qkv, tokens, tokens
        ),
    )


def _compressed(shape: Shape, implementation: str, interpret: Any) -> Search:
    on = device(implementation)
    groups = shape.heads // shape.kv_heads
    chosen = compressed.Selection()
    tokens = sequences(jnp.full(shape.rows, shape.tokens), shape.tokens)
    blocks = in_place(tokens, chosen.block)
    stretched = entries(blocks, chosen.length, chosen.stride)
    qkv = _inputs(shape, stretched.starts.shape[1])
    places = (stretched.tokens, stretched.starts, blocks.heads, blocks.shadows)
    given = (tokens, blocks.own_from, *places)
    options = dict(selection=chosen, implementation=implementation, interpret=interpret)
    return Search(
        tuned.key("compressed", on, groups=groups, head_dim=shape.head_dim),
        compressed_blocks.heuristic(on, groups, shape.head_dim, blocks.heads.shape[1]),
        lambda setting: _with_gradients(
            lambda *x: compressed.compressed_attention(*x, tuning=setting, **options),
            qkv,
            *given,
        ),
    )


def _selected(shape: Shape, implementation: str, interpret: Any) -> Search:
    on = device(implementation)
    groups = shape.heads // shape.kv_heads
    chosen = compressed.Selection()
    qkv = _inputs(shape, -(-shape.tokens // chosen.block) * chosen.block)
    order = jnp.broadcast_to(jnp.arange(qkv[1].shape[1], dtype=jnp.int32), qkv[1].shape[:2])
    count = order.shape[1] // chosen.block
    drawn = (shape.rows, -(-shape.tokens // shape.alike), shape.kv_heads, count)
    ranks = jax.random.uniform(jax.random.key(1), drawn)
    ranks = jnp.repeat(ranks, shape.alike, axis=1)[:, : shape.tokens]
    ranks = jnp.where(
        jnp.arange(count) <= jnp.arange(shape.tokens)[:, None, None] // chosen.block, ranks, -1.0
    )
    best, picks = jax.lax.top_k(ranks, min(chosen.picks, count))
    picks = jnp.where(best < 0, -1, picks).astype(jnp.int32)
    options = dict(size=chosen.block, implementation=implementation, interpret=interpret)
    return Search(
        tuned.key("selected", on, groups=groups, head_dim=shape.head_dim, size=chosen.block),
        selected.heuristic(on),
        lambda setting: _with_gradients(
            lambda *x: selected.selected_attention(*x, tuning=setting, **options),
            qkv,
            picks,
            order[:, : shape.tokens],
            order,
        ),
    )


def _paged(shape: Shape, implementation: str, interpret: Any) -> Search:
    on = device(implementation)
    page = compressed.Selection().block
    count = -(-shape.tokens // page)
    pages = (shape.rows * count, shape.kv_heads, page, shape.head_dim)
    k, v = (jax.random.normal(jax.random.key(i), pages, jnp.bfloat16) for i in range(2))
    q = jax.random.normal(
        jax.random.key(2), (shape.rows, 1, shape.heads, shape.head_dim), jnp.bfloat16
    )
    tables = jnp.arange(shape.rows * count, dtype=jnp.int32).reshape(shape.rows, count)
    lengths = jnp.full(shape.rows, shape.tokens, jnp.int32)
    options = dict(implementation=implementation, interpret=interpret)

    def program(setting):
        step = jax.jit(lambda *x: paged.paged_attention(*x, tuning=setting, **options))
        return lambda: step(q, k, v, tables, lengths[:, None] - 1, lengths)

    return Search(
        tuned.key(
            "paged",
            on,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page=page,
        ),
        paged.tune(on, q, k, count, None),
        program,
    )


def _grouped(shape: Shape, implementation: str, interpret: Any) -> Search:
    on = device(implementation)
    groups, size, columns = shape.matrices
    rows = shape.rows * shape.tokens
    drawn = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(drawn[0], (rows, size), jnp.bfloat16)
    w = jax.random.normal(drawn[1], (groups, size, columns), jnp.bfloat16)
    along = jax.random.normal(drawn[3], (rows, columns), jnp.float32)
    of_rows = jax.random.randint(drawn[2], rows, 0, groups)
    counts = jnp.bincount(of_rows, length=groups).astype(jnp.int32)
    options = dict(implementation=implementation, interpret=interpret)

    def program(setting):
        def total(x, w, along, counts):
            out = grouped.grouped_product(x, w, counts, tuning=setting, **options)
            return jnp.sum(out * along)

        step = jax.jit(jax.grad(total, (0, 1)))
        return lambda: step(x, w, along, counts)

    return Search(
        tuned.key("grouped", on, groups=groups, size=size, columns=columns),
        grouped_blocks.heuristic(on, rows, groups),
        program,
    )


KERNELS = {
    "flash": _flash,
    "compressed": _compressed,
    "selected": _selected,
    "paged": _paged,
    "grouped": _grouped,
}
