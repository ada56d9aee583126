"""Pages in the host's memory: those of prompts and documents that nobody holds, and whose place on
the device was needed for something else.

A page is known by the name by which ``PageAllocator`` can find it: a hash of its tokens and of the
number of the weights, for a prompt also of all tokens before them. So a page that comes back is the
one that a prefill would write, bit for bit.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class HostPages:
    """Pages by name, in pinned memory where the device has such (``to_host``), and as numpy
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
        for name, page in zip(names, _apart(list(content), len(names)), strict=True):
            self._kept[name] = page
            self.bytes += _nbytes(page)
        while self.bytes > self._budget:
            self.bytes -= _nbytes(self._kept.popitem(last=False)[1])

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
    return [jnp.stack(each) for each in zip(*map(_to_device, pages), strict=True)]


def to_host(tree):
    """Device arrays in host memory.

    It is page-locked where the backend has such memory, since arrays travel fastest from there.
    """

    def move(x: jax.Array):
        if not _has_pinned(x):
            return np.asarray(x)
        return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))

    return jax.tree.map(move, tree)


def _apart(tree, count: int) -> list:
    """The first ``count`` entries along axis 0 of device arrays, each as a tree of its own in host
    memory.
    """
    # arrays in page-locked memory cannot be cut, so the entries are cut before they move
    if any(_has_pinned(x) for x in jax.tree.leaves(tree)):
        return [to_host(jax.tree.map(lambda x, at=at: x[at], tree)) for at in range(count)]
    # Everything moves at once and is cut afterwards. The parts are copies, since a view would keep
    # the whole array in memory.
    tree = to_host(tree)
    return [jax.tree.map(lambda x, at=at: x[at].copy(), tree) for at in range(count)]


def _has_pinned(x: jax.Array) -> bool:
    (device, *_) = x.devices()
    # all memory of a CPU is the host's already, and locked pages would only cost copies
    return device.platform != "cpu" and "pinned_host" in {
        memory.kind for memory in device.addressable_memories()
    }


def _to_device(page: list[jax.Array]) -> list[jax.Array]:
    return [jax.device_put(x, x.sharding.with_memory_kind("device")) for x in page]


def _nbytes(page) -> int:
    return sum(x.nbytes for x in page)
