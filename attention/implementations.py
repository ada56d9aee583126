"""The implementation that each attention call of a model takes: a kernel, or XLA and why.

The kernels of attention cannot run float32 on GPU, heads of more than 128, or small blocks. Such
calls go to XLA. The dry run prints what each call takes, and a run logs it when it starts, so that
nobody has to find it out from a profile.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pallas_kernels import choice
from pallas_kernels.compressed import api as compressed
from pallas_kernels.compressed import paged as paged_compressed
from pallas_kernels.compressed.blocks import Selection
from pallas_kernels.flash import api as flash
from pallas_kernels.latent import api as latent
from pallas_kernels.paged import api as paged
from pallas_kernels.selected import api as selected

if TYPE_CHECKING:
    from attention.methods.method import Method

XLA = "xla"
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


@dataclasses.dataclass(frozen=True)
class Implementation:
    """The implementation of one attention call of a model, or its experts."""

    # The method and its settings, or "experts".
    method: str
    # Layers of that method.
    layers: int
    # Which of the layer's calls, as "window".
    part: str
    # "train", "prefill" or "decode".
    phase: str
    # "tpu", "gpu" or "cpu", the kernel of that name, or "xla".
    implementation: str
    # Why no kernel runs; "" where one does.
    reason: str

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.layers} x {self.method}, {self.part}, {self.phase}: " + (
            f"{self.implementation}{why}"
        )


def implementations(
    methods: Sequence[Method], shape: CallShape, dtype: str, platform: str | None = None
) -> list[Implementation]:
    """The implementation that each attention call of a model takes, for the dry run and the log.

    methods: the method of every layer.
    shape: the sizes of the calls on one device.
    dtype: of queries, keys and values, such as "bfloat16". Call the function twice where training
      and sampling differ in it.
    platform: "cpu", "tpu", "hopper" or "blackwell" (``planner.targets.Target.kind``), or None for
      the platform of this process.
    """
    platform = choice.here() if platform is None else platform
    found = []
    for method, layers in Counter(methods).items():
        calls = sorted(method.calls(shape), key=lambda call: PHASES.index(call.phase))
        if not calls:  # a method that asks for no kernel, as one from outside of the tree may
            reason = "the method asks for no kernel"
            found += [
                Implementation(str(method), layers, "all", phase, XLA, reason) for phase in PHASES
            ]
        for call in calls:
            name, reason = kernel_or_xla(flash.KERNELS, call.obstacle, platform, dtype)
            found.append(Implementation(str(method), layers, call.part, call.phase, name, reason))
    return found


def kernel_or_xla(
    names: Iterable[str],
    obstacle: Callable[[str, str, str], str | None],
    platform: str,
    dtype: str,
) -> tuple[str, str]:
    """(the first kernel of ``names`` that can run, or "xla"; why it is no kernel).

    obstacle: as ``Call.obstacle``.
    """
    reasons = {}
    for name in names:
        reason = obstacle(platform, name, dtype)
        if reason is None:
            return name, ""
        reasons[name] = reason
    # the reason that matters is that of the kernel for this platform, where there is one
    mine = [name for name in reasons if not choice.platform_obstacle(name, platform)]
    return XLA, reasons[mine[0]] if mine else f"no kernel for {platform}"


# --- The calls that methods are made of ----------------------------------------------------------


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
