"""The attention calls of a layer that a kernel may serve, of which methods are made.

A call knows its shapes, and why a kernel cannot run it. ``implementations`` chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pallas_kernels.compressed import api as compressed
from pallas_kernels.compressed import paged as paged_compressed
from pallas_kernels.compressed.blocks import Selection
from pallas_kernels.flash import api as flash
from pallas_kernels.latent import api as latent
from pallas_kernels.paged import api as paged
from pallas_kernels.selected import api as selected

PHASES = ("train", "prefill", "decode")


@dataclasses.dataclass(frozen=True)
class CallShape:
    """The sizes of a model's attention calls on one device."""

    # Query heads, key/value heads and their size, on one device: after tensor parallelism.
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Rows of a training batch on one device, and tokens of a row.
    train_rows: int
    train_tokens: int
    # Rows that a prefill step takes, and tokens of a chunk.
    prefill_rows: int
    prefill_tokens: int
    # Rows that decode together.
    decode_rows: int
    # Tokens of a page, and pages of a row's table.
    page: int
    pages: int

    def queries(self, phase: str) -> tuple[int, int, int, int]:
        """The shape of q in a phase."""
        rows = getattr(self, f"{phase}_rows")
        tokens = 1 if phase == "decode" else getattr(self, f"{phase}_tokens")
        return rows, tokens, self.num_heads, self.head_dim

    def keys(self, phase: str) -> tuple[int, int, int, int]:
        """The shape of k in a phase, all places side by side."""
        tokens = self.train_tokens if phase == "train" else self.pages * self.page
        return getattr(self, f"{phase}_rows"), tokens, self.num_kv_heads, self.head_dim


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention call of a layer."""

    # Which of the layer's calls, as "window".
    part: str
    # One of PHASES.
    phase: str
    # A function of (platform, kernel "tpu" or "gpu", dtype): why that kernel cannot run it, or
    # None.
    obstacle: Callable[[str, str, str], str | None]


def rows_calls(part: str, shape: CallShape, decode: bool = False) -> tuple[Call, ...]:
    """Attention over whole rows: ``Layout.attend`` in training, ``PageReader.dense`` in prefill.

    decode: whether decoding attends to whole rows too.
    """

    def call(phase: str) -> Call:
        def obstacle(platform: str, name: str, dtype: str) -> str | None:
            return flash.obstacle_on(platform, name, dtype, shape.queries(phase), shape.keys(phase))

        return Call(part, phase, obstacle)

    return tuple(call(phase) for phase in (PHASES if decode else PHASES[:2]))


def paged_call(part: str, shape: CallShape) -> Call:
    """Decoding from pages where they lie, all of them or the chosen ones."""
    pages = (shape.decode_rows * shape.pages, shape.num_kv_heads, shape.page, shape.head_dim)

    def obstacle(platform: str, name: str, dtype: str) -> str | None:
        return paged.obstacle_on(platform, name, dtype, shape.queries("decode"), pages)

    return Call(part, "decode", obstacle)


def latent_call(part: str, shape: CallShape, rank: int) -> Call:
    """Decoding from pages of latent vectors, whose first ``rank`` elements are the value."""
    pages = (shape.decode_rows * shape.pages, 1, shape.page, shape.head_dim)

    def obstacle(platform: str, name: str, dtype: str) -> str | None:
        return latent.obstacle_on(platform, name, dtype, shape.queries("decode"), pages, rank)

    return Call(part, "decode", obstacle)


def chosen_calls(
    part: str, shape: CallShape, lists: int, block: int, picks: int
) -> tuple[Call, ...]:
    """``selected_attention`` in training and prefill. lists: lists of picks of a query."""

    def call(phase: str) -> Call:
        q_shape = shape.queries(phase)
        # at least this many; rows that are aligned have some blocks more
        blocks = -(-shape.keys(phase)[1] // block)
        picks_shape = (*q_shape[:2], lists, picks)

        def obstacle(platform: str, name: str, dtype: str) -> str | None:
            return selected.obstacle_on(platform, name, dtype, q_shape, picks_shape, block, blocks)

        return Call(part, phase, obstacle)

    return tuple(call(phase) for phase in PHASES[:2])


def compressed_calls(part: str, shape: CallShape, selection: Selection) -> tuple[Call, ...]:
    """``compressed_attention`` in every phase."""

    def call(phase: str) -> Call:
        rows, tokens, heads, size = shape.keys(phase)
        blocks = -(-tokens // selection.block)
        k_shape = (rows, blocks * selection.ratio, heads, size)

        def obstacle(platform: str, name: str, dtype: str) -> str | None:
            if phase == "decode":
                pages = (rows * shape.pages, heads, shape.page // selection.stride, size)
                entries = shape.pages * pages[2]
                q_shape = shape.queries(phase)
                return paged_compressed.obstacle_on(platform, name, dtype, q_shape, pages, entries)
            return compressed.obstacle_on(
                platform, name, dtype, shape.queries(phase), k_shape, selection
            )

        return Call(part, phase, obstacle)

    return tuple(call(phase) for phase in PHASES)
