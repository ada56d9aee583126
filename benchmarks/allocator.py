"""Settings of the C library's allocator that let a process keep large blocks of memory.

By default the allocator gives freed large blocks back to the system. Every step then gets its
memory anew, page by page, which costs time.
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
    """Starts this program again with these settings, unless GLIBC_TUNABLES is set already.

    It must be called before anything else, since the allocator reads them when a process starts.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = TUNABLES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
