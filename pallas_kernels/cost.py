"""Lower bound on a kernel's cost, for comparison with its measured time."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cost:
    """The least that a kernel has to do."""

    # Floating-point operations of its products.
    flops: int
    # Exponentials.
    transcendentals: int
    # Bytes read from HBM and written to it.
    bytes_accessed: int
