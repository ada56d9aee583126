"""What a kernel costs at least, beside which its time is judged."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a kernel does at least: floating-point operations of its products, exponentials, bytes
    of HBM moved.
    """

    flops: int
    transcendentals: int
    bytes_accessed: int
