"""Adapters in training, and rows to compute for what clients ask of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from models.lora import Adapters
from people.serving.tinker.adapters import AdapterSettings, State
from people.serving.tinker.history import Asked
from people.serving.tinker.wire import Forward, write_forward_output


@dataclasses.dataclass(eq=False)
class Model:
    """An adapter in training."""

    id: str
    user: str
    session: str
    settings: AdapterSettings
    metadata: Mapping[str, Any] | None
    at: float
    # None until its record has been read.
    state: State | None = None
    # Number of the request that comes next, and those that wait.
    next: int = 1
    waiting: dict[int, Asked] = dataclasses.field(default_factory=dict)
    # True while rows of a request are computed.
    busy: bool = False


@dataclasses.dataclass(eq=False)
class Work:
    """Rows to compute for one request."""

    forward: Forward
    # The adapter; None for the base model.
    part: Mapping[str, Adapters] | None
    done: Callable[[Work, Exception | None], None]
    # Indices of data that have not been computed yet.
    left: list[int]
    outputs: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    gradient: Any = None
    state: State | None = None
    # Batch for batch: tokens, rows, targets, adapters in it, and [row, datum] of each own row.
    batches: list[list] = dataclasses.field(default_factory=list)

    @property
    def backward(self) -> bool:
        """True if the gradient is wanted."""
        return not self.forward.forward_only


def written(work: Work) -> bytes:
    """The result of a request as the client reads it."""
    count = len(work.forward.data)
    outputs = [{"logprobs": work.outputs[index]} for index in range(count)]
    return write_forward_output(outputs, {"loss:sum": sum(work.losses[i] for i in range(count))})


def not_finite(work: Work) -> Exception | None:
    """An error that names the first datum whose loss is not finite; None where all are."""
    bad = [index for index, loss in sorted(work.losses.items()) if not np.isfinite(loss)]
    return ValueError(f"the loss of data[{bad[0]}] is not finite") if bad else None
