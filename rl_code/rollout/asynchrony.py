"""Settings for the distance that sampling may run ahead of training (``rl_code.schedule``)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rl_code.store.claims import WorkConfig
from rl_code.weights.versions import WeightsConfig

# Least and greatest bound.
MODES = {"sync": (0, 0), "one_step": (1, 1), "behind": (1, None), "in_flight": (1, None)}


@dataclasses.dataclass(frozen=True)
class AsynchronyConfig:
    """Settings for the distance that sampling may run ahead of training."""

    # "sync": a step is sampled with the weights that it trains. "one_step": a step is sampled with
    # the version before, while the update of the step before is made. "behind": the same with the
    # version ``max_staleness`` updates before. "in_flight": sampling goes on all the time, and
    # takes the newest weights in the middle of messages.
    mode: Literal["sync", "one_step", "behind", "in_flight"] = "sync"
    # The greatest staleness: by how many versions the learner may be ahead of the version that
    # sampled a token. In a run None means the least that the mode allows.
    max_staleness: int | None = None
    # Only for "in_flight": True if episodes in progress compute their keys and values again when
    # new weights come. False keeps those of older weights.
    recompute: bool = False
    # Times after which a process counts as lost, and the learner stops waiting.
    work: WorkConfig = WorkConfig()
    # Settings for storing and keeping versions of the weights.
    weights: WeightsConfig = WeightsConfig()

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is not one of {', '.join(MODES)}")
        if self.recompute and self.mode != "in_flight":
            raise ValueError(
                f"recompute=True has no meaning in mode={self.mode!r}, which never swaps weights"
            )
        if self.max_staleness is None:
            return
        least, most = MODES[self.mode]
        if self.max_staleness < least or (most is not None and self.max_staleness > most):
            wanted = f"at least {least}" if most is None else str(most)
            raise ValueError(
                f"max_staleness={self.max_staleness} must be {wanted} in mode={self.mode!r}"
            )
        if self.weights.keep is not None and self.weights.keep <= self.max_staleness:
            raise ValueError(
                f"weights.keep={self.weights.keep} must be more than "
                f"max_staleness={self.max_staleness}: "
                "actors sample with versions that old"
            )
