"""The implementation that each attention call of a model takes: a kernel, or XLA and why.

The kernels of attention cannot run float32 on GPU, heads of more than 128, or small blocks. Such
calls go to XLA. The dry run prints what each call takes, and a run logs it when it starts, so that
nobody has to find it out from a profile.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from attention.calls import PHASES, CallShape
from attention.methods.method import Method
from pallas_kernels import choice
from pallas_kernels.flash import api as flash

XLA = "xla"


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
