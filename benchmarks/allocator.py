"""The C library's allocator, told to keep large blocks: by default it returns them and faults them
in at every step.
"""

from __future__ import annotations

import os
import sys

TUNABLES = ":".join(
    f"glibc.malloc.{name}"
    for name in (
        "arena_max=1",
        "hugetlb=1",
        "mmap_threshold=8589934592",
        "trim_threshold=8589934592",
        "top_pad=268435456",
    )
)


def keep_memory() -> None:
    """Starts this program anew with the allocator tuned, unless GLIBC_TUNABLES is set; call before
    anything else.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = TUNABLES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
