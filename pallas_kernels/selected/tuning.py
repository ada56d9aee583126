"""Sizes of what the kernels of chosen blocks work on."""

from __future__ import annotations

import dataclasses

from pallas_kernels.tuned import check_positive


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Sizes of the kernels over chosen blocks."""

    # Most queries, of all rows of the batch together, whose tiles are in memory at once. With 64
    # heads of 128 and 16 picks, 4,096 queries take 1 GiB of results in bfloat16, and as much of
    # rows where XLA gathers them. Backward, the gradients of queries take 2 GiB, in float32.
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
    # On GPU, whether the kernels gather queries themselves, where they can (``gpu.gathers``).
    gather_in_kernel: bool = True
    # On GPU, "wgmma" (Hopper) or "tcgen05" (Blackwell).
    matrix_unit: str = "wgmma"

    def __post_init__(self) -> None:
        check_positive(self)


def heuristic(device: str) -> TuningConfig:
    """Sizes for "tpu", "hopper" or "blackwell", chosen by reasoning and not by timing."""
    # large tiles on TPU, where a grid step costs as much as some hundred rows
    return TuningConfig(matrix_unit="tcgen05" if device == "blackwell" else "wgmma")
