"""Sizes of what the kernels of chosen blocks work on, and what they cost."""

from __future__ import annotations

import dataclasses

from pallas_kernels.cost import Cost


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Sizes of the kernels over chosen blocks."""

    # Most queries, of all rows of the batch together, whose tiles are in memory at once.
    chunk: int = 4096
    # Most rows of a tile (queries times heads) on TPU. On GPU a tile always has 128.
    rows: int = 512
    # Tiles in flight on GPU. On TPU there are always two.
    steps: int = 2
    # Consecutive tiles that one thread block of a GPU goes through.
    span: int = 8
    # On GPU, most consecutive tiles of a block over which one thread block sums the gradients of
    # keys and values. Each span has sums of its own in memory.
    span_kv: int = 256
    # On GPU, "wgmma" (Hopper) or "tcgen05" (Blackwell).
    matrix_unit: str = "wgmma"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "int" and (value := getattr(self, field.name)) < 1:
                raise ValueError(f"{field.name}={value} must be positive")


def heuristic(device: str) -> TuningConfig:
    """Sizes for "tpu", "hopper" or "blackwell", chosen by reasoning and not by timing."""
    # large tiles on TPU, where a grid step costs as much as some hundred rows
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
    """The cost of "forward" or "backward" on causal rows q [B, T, N, H] and k [B, S, K, H].

    picks: blocks that a query chooses, of ``size`` keys each. passes: how often the backward pass
    computes the weights again.

    The bytes count, for every query and every block that it chose, the row that is copied into a
    tile and read there, and the result that is written, put side by side and summed. They do not
    count the keys, which every chunk of queries reads once, nor the rows that fill up the tiles.
    """
    batch, queries, heads, head_dim = q_shape
    blocks = k_shape[1] // size
    # query t sees 1 + t J / T blocks, and chooses no more than it sees
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
