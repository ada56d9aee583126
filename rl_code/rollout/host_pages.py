"""Pages of prompts in the host's memory: those that nobody holds, and whose place on the device was
needed for something else.

A page is known by the name that ``PageAllocator`` gave it: a hash of its tokens, of all tokens
before them, and of the number of the weights. So a page that comes back is the one that a prefill
would write, bit for bit.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.cache.storage import nbytes, to_device, to_host_apart


class HostPages:
    """Pages by name, in pinned memory where the device has such (``to_host_apart``), and as numpy
    arrays on CPU. The least recently used ones go first.

    budget: the most bytes that they take.
    """

    def __init__(self, budget: float):
        self._budget = budget
        self._kept: collections.OrderedDict[bytes, Any] = collections.OrderedDict()
        self.bytes = 0

    def clear(self) -> None:
        """Forgets all pages."""
        self._kept.clear()
        self.bytes = 0

    def keep(self, names: Sequence[bytes], content: Sequence[jax.Array]) -> None:
        """Copies pages to the host that it lacks, each under another name.

        content: of each array of the cache the pages [C, ...] on the device, of which the first are
        those of ``names``.
        """
        for name, page in zip(names, to_host_apart(list(content), len(names)), strict=True):
            self._kept[name] = page
            self.bytes += nbytes(page)
        while self.bytes > self._budget:
            self.bytes -= nbytes(self._kept.popitem(last=False)[1])

    def lacks(self, name: bytes) -> bool:
        """True if a page is not here; one that is counts as used."""
        if name in self._kept:
            self._kept.move_to_end(name)
            return False
        return True

    def find(self, names: Sequence[bytes | None]) -> list[Any]:
        """The pages of the first names, up to one that is not here."""
        found = []
        for name in names:
            if name is None or name not in self._kept:
                break
            self._kept.move_to_end(name)
            found.append(self._kept[name])
        return found


def together(pages: Sequence[Any]) -> list:
    """Pages as ``HostPages.find`` gives them, as one block: an array [C, ...] for each array of the
    cache, on the host or on the device.
    """
    if isinstance(pages[0][0], np.ndarray):
        return [np.stack(each) for each in zip(*pages, strict=True)]
    return [jnp.stack(each) for each in zip(*map(to_device, pages), strict=True)]
