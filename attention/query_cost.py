"""Elements that a layer multiplies for one query, by arithmetic: the terms that methods add up.

Kernels work on whole blocks and tiles, and mask what a query does not see of them. For attention to
all keys of a row that is half a block of thousands of keys, and not counted. A window, compressed
keys and chosen blocks are few keys, and it is counted (``QueryCost.masked``).
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.selected.tuning import TuningConfig

# Queries and keys of a block of ``pallas_kernels.flash`` on GPU, and rows (queries times heads) of
# a tile of ``pallas_kernels.selected`` there.
BLOCK = 128
ROWS = 128
# Tokens of a page of a cache, which decoding reads whole.
PAGE = 64
# Queries whose tiles are made together.
CHUNK = TuningConfig().chunk


class QueryCost(NamedTuple):
    """Elements of keys and values that a layer multiplies for one query, of all heads together.

    Each is a multiply-add, which is two operations.
    """

    # Of keys that the query sees and that kernels or blocks of XLA read where they lie. They skip
    # blocks that nobody sees.
    attended: float
    # Of keys that the query chose, gathered for it alone.
    chosen: float = 0.0
    # Of the keys that an indexer scores, to choose among them. Every device has all its heads.
    scored: float = 0.0
    # Of keys that the query does not see, in blocks that are computed whole.
    masked: float = 0.0
    # Of blocks or compressed keys that the layer's heads score once more, to choose among them.
    ranked: float = 0.0
    # By parameters that make keys of several tokens (``Method.derives``), and of a recurrent state
    # and what it is made of. The backward pass takes two products for each.
    derived: float = 0.0
    # Of the inverses of triangular systems, which the backward pass has from the forward pass.
    inverted: float = 0.0
    # Of what ``derived`` counts already and the backward pass computes once more.
    repeated: float = 0.0


def windowed(seen: float, window: int, decode: bool) -> tuple[float, float]:
    """(keys that a query sees, keys that are computed and masked) of the last ``window`` of those
    that it might see.

    The queries of a block see ``window`` and one block of keys together. In decoding a query's
    window begins and ends within pages.
    """
    size = PAGE if decode else BLOCK
    return min(seen, window), size / 2 if seen < window else size


def chosen(
    seen: float, row: int, block: int, picks: int, groups: int, decode: bool
) -> tuple[float, float]:
    """(keys that a query sees, keys that are computed and masked) of the blocks that it chose, its
    own among them.

    Of its own block a query sees half on average. In rows, the queries of a chunk that chose a
    block are gathered into tiles, and the last tile of a block is half full on average.

    groups: query heads that share a choice.
    """
    visible = min(seen, (picks - 0.5) * block)
    whole = min(seen + block / 2, picks * block)
    if decode:
        return visible, whole - visible
    tiles = seen * ROWS / 2 / (min(row, CHUNK) * groups)
    return visible, whole - visible + tiles


def gathered(row: int, picks: int, heads: int, head_dim: int) -> int:
    """Elements of the queries that are gathered into tiles at a time, one row for each head, query
    and pick.
    """
    return min(row, CHUNK) * picks * heads * head_dim
