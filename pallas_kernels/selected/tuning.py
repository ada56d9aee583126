"""Sizes of what the kernels of chosen blocks work on, and what they cost."""

from __future__ import annotations

import dataclasses

from pallas_kernels.cost import Cost


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """chunk: most queries of all rows whose tiles are in memory at once. rows: most rows of a tile
    (queries x heads).

    On GPU tiles have 128 rows; steps: tiles in flight, on TPU there are always two; span: tiles
    that a thread block goes through; matrix_unit: "wgmma" (Hopper) or "tcgen05" (Blackwell).
    """

    chunk: int = 4096
    rows: int = 512
    steps: int = 2
    span: int = 8
    matrix_unit: str = "wgmma"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "int" and (value := getattr(self, field.name)) < 1:
                raise ValueError(f"{field.name}={value} must be positive")


def heuristic(device: str) -> TuningConfig:
    """Sizes for "tpu", "hopper" or "blackwell"; nothing was timed."""
    # on TPU a grid step costs as much as some hundred rows
    return TuningConfig(matrix_unit="tcgen05" if device == "blackwell" else "wgmma")


def cost(
    kernel: str,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    itemsize: int,
    *,
    picks: int,
    size: int,
    passes: int,
) -> Cost:
    """Cost of "forward" or "backward" of causal rows q [B, T, N, H] and k [B, S, K, H] that choose
    so many blocks.

    passes: how often the backward pass computes the weights again. Counted are, for every query and
    block it chose, the rows of queries that are copied into tiles and read there, and what is
    found, written, put side by side and summed; not the keys, which every chunk of queries reads
    once, nor the rows that fill up the tiles.
    """
    batch, queries, heads, head_dim = q_shape
    blocks = k_shape[1] // size
    chosen = batch * heads * sum(min(picks, 1 + t * blocks // queries) for t in range(queries))
    if kernel == "forward":
        products = 2
        exponentials = 1
        moved = 3 * itemsize + 4 * itemsize
    else:
        products = 3 + 2 * passes
        exponentials = passes
        moved = (4 + 2 * passes) * itemsize + 4 * 4
    return Cost(
        products * 2 * head_dim * chosen * size,
        exponentials * chosen * size,
        moved * chosen * head_dim,
    )
