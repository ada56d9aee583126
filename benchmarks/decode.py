"""Decoding one token of several rows against pages, method by method: time and bytes read.

Pages hold random keys. The bytes are those of keys and values that a method reads of a row by its
definition (2502.11089, table 4), so that bytes over seconds compares with a device's bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import rich.table

from attention.cache.paged import PagedCache, attend
from attention.cache.tables import sequence_pages
from attention.calls import CallShape
from attention.implementations import implementations
from attention.methods.method import LayerShape, Method, PageShape
from planner.timing import spread

# Tokens of a page of a method without blocks.
PAGE = 64
COLUMNS = ("tokens", "method", "takes", "ms [range]", "CPU ms", "MB read", "GB/s", "x dense")


def measure(
    name: str, method: Method, tokens: int, rows: int, shape: LayerShape, dtype: str, repeats: int
) -> dict:
    """Seconds and bytes of one token of ``rows`` rows of ``tokens`` tokens each, in one layer."""
    page = method.block_size() or PAGE
    count = -(-tokens // page)
    pages = PageShape(rows * count, shape.num_kv_heads, page, shape.head_dim, dtype)
    layer = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(0), x.shape, x.dtype), method.pages(pages)
    )
    cache = PagedCache((layer,), (method,), page)
    q = jax.random.normal(jax.random.key(1), (rows, 1, shape.num_heads, shape.head_dim), dtype)
    parts = {at: x.shape[-1] for at, x in method.parameters(shape).items()}.get("gates")
    inputs = None if parts is None else jnp.full((*q.shape[:3], parts), 0.5, dtype)
    tables = jnp.arange(rows * count, dtype=jnp.int32).reshape(rows, count)

    @jax.jit
    def step(cache: PagedCache, q: jax.Array) -> jax.Array:
        lengths = jnp.full(rows, tokens, jnp.int32)
        view = sequence_pages(tables, lengths, page)
        seen, _ = view.at(lengths[:, None] - 1)
        return attend(cache, 0, q, seen, view, inputs=inputs)

    return dict(
        method=name,
        tokens=tokens,
        rows=rows,
        implementation=_implementation(method, tokens, rows, shape, page, dtype),
        bytes=rows * method.decode_bytes(tokens, shape, dtype),
        **spread(lambda: step(cache, q), repeats),
    )


def _implementation(
    method: Method, tokens: int, rows: int, shape: LayerShape, page: int, dtype: str
) -> str:
    """The implementation of each call of the method here, as "selected: gpu, window: gpu"."""
    sizes = CallShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        train_rows=1,
        train_tokens=tokens,
        prefill_rows=1,
        prefill_tokens=page,
        decode_rows=rows,
        page=page,
        pages=-(-tokens // page),
    )
    found = implementations([method], sizes, dtype)
    return ", ".join(f"{x.part}: {x.implementation}" for x in found if x.phase == "decode")


def cost(row: dict) -> float:
    """The seconds by which a row is compared with others: of the CPU where they are known. NaN for
    a row that did not run.
    """
    return row.get("cpu_seconds", row.get("seconds", math.nan))


def table(rows: list[dict]) -> rich.table.Table:
    """One line for each method and length, with its speed against dense at that length."""
    view = rich.table.Table(title="decoding one token", title_justify="left")
    for name in COLUMNS:
        view.add_column(name, justify="left" if name in ("method", "takes") else "right")
    for cells in cells_of(rows):
        view.add_row(*cells)
    return view


def cells_of(rows: list[dict]) -> Iterator[tuple[str, ...]]:
    """The cells of ``table``, line by line."""
    dense = {row["tokens"]: cost(row) for row in rows if row["method"] == "dense"}
    for row in rows:
        milliseconds = (1e3 * row[name] for name in ("seconds", "fastest", "slowest"))
        ratio = dense[row["tokens"]] / cost(row) if row["tokens"] in dense else None
        yield (
            str(row["tokens"]),
            row["method"],
            row["implementation"],
            "{:.3f} [{:.3f}, {:.3f}]".format(*milliseconds),
            f"{1e3 * row['cpu_seconds']:.3f}" if "cpu_seconds" in row else "-",
            f"{row['bytes'] / 1e6:,.1f}",
            f"{row['bytes'] / row['seconds'] / 1e9:,.1f}",
            "-" if ratio is None else f"{ratio:.2f}",
        )
