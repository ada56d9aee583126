"""Places of the tokens of a row when devices cut the row: no document lies on two devices unless
it must.

With ``mesh.context`` every device has an equal part of the slots of a row. Who sees whom does not
depend on slots, so slots may stay empty. They do in front of a document that would reach over the
border of a part: it then begins at the border, and one device has all of it. A document lies on
several devices where it is longer than a part, or where the row has no empty slots left.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from pallas_kernels.tokens import Tokens


@dataclasses.dataclass
class Slots:
    """Gives the tokens of a row their slots, one run after another."""

    # Runs start at multiples of it.
    align: int
    # Slots of a device's part of the row.
    part: int
    # How many slots may still stay empty in front of documents.
    spare: int
    # The slot behind the last token so far.
    end: int = 0

    @property
    def free(self) -> int:
        """The slot at which the next run begins."""
        return -(-self.end // self.align) * self.align

    def take(self, documents: np.ndarray) -> np.ndarray:
        """The slots of a run of tokens, int [n], rising.

        documents: int [n], the document that each token stands in, from 1; others are in none.
        """
        slots = self.free + np.arange(len(documents))
        for start, end in _spans(documents) if self.spare else ():
            first = slots[start]
            border = (first // self.part + 1) * self.part
            begin = -(-border // self.align) * self.align
            behind = begin + end - start
            if slots[end - 1] < border or behind > border + self.part:
                continue  # it lies in one part, or would lie in two again
            if begin - first <= self.spare:
                self.spare -= begin - first
                slots[start:] += begin - first
        if len(slots):
            self.end = int(slots[-1]) + 1
        return slots

    def after(self, runs: Iterable[np.ndarray]) -> Slots:
        """The slots as they will be behind these runs, each given as for ``take``."""
        behind = dataclasses.replace(self)
        for documents in runs:
            behind.take(documents)
        return behind


def _spans(documents: np.ndarray) -> list[tuple[int, int]]:
    """(first, behind the last) of each document in a run of tokens."""
    borders = np.flatnonzero(np.diff(documents, prepend=-2, append=-2))
    return [(start, end) for start, end in itertools.pairwise(borders) if documents[start] > 0]


def cut_documents(tokens: Tokens, parts: int) -> int:
    """Number of documents of rows that lie on several devices.

    tokens: of numpy arrays [R, S]. parts: devices over which the slots of a row are cut.
    """
    _, size = tokens.shape
    behind = np.arange(size // parts, size, size // parts)
    marks = np.stack([tokens.segments, tokens.branches, tokens.documents])
    same = (marks[:, :, behind] == marks[:, :, behind - 1]).all(axis=0)
    row, border = np.nonzero(same & (tokens.documents[:, behind] > 0))
    # a document may reach over several borders
    return len(np.unique(np.stack([row, *marks[:, row, behind[border]]]), axis=1).T)
