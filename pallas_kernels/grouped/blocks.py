"""Block sizes of the grouped products."""

from __future__ import annotations

import dataclasses

from pallas_kernels.tuned import check_positive


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Sizes of the blocks that a product is cut into."""

    # Rows of a block, all of one group. In the outer product it is how many are added at a time.
    rows: int
    # Of the axis that is contracted, and of the columns of the result, at most this much.
    contracted: int = 64
    columns: int = 256
    # Blocks in flight on GPU. On TPU there are always two.
    steps: int = 3
    # On GPU, "wgmma" (Hopper) or "tcgen05" (Blackwell).
    matrix_unit: str = "wgmma"

    def __post_init__(self) -> None:
        check_positive(self)


def heuristic(device: str, rows: int, groups: int) -> TuningConfig:
    """Block sizes for a device, chosen by reasoning and not by timing.

    device: "cpu", "tpu", "hopper" or "blackwell". rows: of all groups together.
    """
    if device == "cpu":
        # few where groups have few rows, since a group's last piece is partly wasted
        return TuningConfig(16 if rows < 64 * groups else 64)
    if device == "tpu":
        # A block at the border of two groups is multiplied with both, so blocks are a quarter of
        # what a group has. The other axes are as long as VMEM allows.
        return TuningConfig(min(max(128, rows // groups // 4 // 128 * 128), 512), 8192, 2048)
    return TuningConfig(128, matrix_unit="tcgen05" if device == "blackwell" else "wgmma")
